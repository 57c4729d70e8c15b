//! What each version has done in each stage, by the events that its instances wrote.

use std::collections::HashMap;

use anyhow::Context;
use sqlx::{PgPool, postgres::PgPoolOptions};

use super::plan::{Stage, Version};

/// How many events there were of each stage, version and kind, and how many of them on rows that the other version had
/// written last. `$1` are the moments when the stages begin and end, in turn, so that those within a stage are in
/// buckets with an odd number. The version is the third part of an instance's name.
const BY_STAGE: &str = "
    SELECT bucket / 2, version, event_type = 'scheduled',
           count(*), count(*) FILTER (WHERE before <> version)
    FROM (SELECT width_bucket(extract(epoch FROM at)::float8, $1::float8[]) AS bucket,
                 split_part(instance, '-', 3) AS version, event_type,
                 lag(split_part(instance, '-', 3)) OVER (PARTITION BY task_id ORDER BY id) AS before
          FROM retry_events) e
    WHERE bucket % 2 = 1 AND event_type IN ('scheduled', 'retry_attempt', 'retry_exhausted')
    GROUP BY 1, 2, 3";

/// What a version did in one stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Failures that it stored.
    pub stored: i64,
    /// Those of them that the other version had sent back before.
    pub stored_of_other: i64,
    /// Messages that it sent back or gave to review.
    pub settled: i64,
    /// Those of them that the other version had stored.
    pub settled_of_other: i64,
}

/// What each version did in each stage.
pub type Deeds = HashMap<(usize, Version), Done>;

/// The moments between which a stage's events lie, by the clock of Postgres.
pub struct Diary {
    pool: PgPool,
    moments: Vec<f64>,
}

impl Diary {
    pub fn open(url: &str) -> anyhow::Result<Self> {
        let pool = PgPoolOptions::new().max_connections(1).connect_lazy(url)?;
        let moments = Vec::new();
        Ok(Self { pool, moments })
    }

    /// Notes that a stage begins, or that the one which has begun ends.
    pub async fn note(&mut self) -> anyhow::Result<()> {
        let sql = "SELECT extract(epoch FROM clock_timestamp())::float8";
        self.moments
            .push(sqlx::query_scalar(sql).fetch_one(&self.pool).await?);
        Ok(())
    }

    /// Notes the end of a stage that was broken off, if there is one.
    pub async fn close(&mut self) -> anyhow::Result<()> {
        if self.moments.len() % 2 == 1 {
            self.note().await?;
        }
        Ok(())
    }

    /// How many stages have ended.
    pub fn stages(&self) -> usize {
        self.moments.len() / 2
    }

    pub async fn deeds(&self) -> anyhow::Result<Deeds> {
        type Row = (i32, String, bool, i64, i64);
        let rows: Vec<Row> = sqlx::query_as(BY_STAGE)
            .bind(&self.moments)
            .fetch_all(&self.pool)
            .await
            .context("looking who did what")?;
        let mut deeds = Deeds::new();
        for (stage, version, is_stored, all, of_other) in rows {
            let version = Version::of_name(&version)
                .with_context(|| format!("an event of no version of ours: {version:?}"))?;
            let done = deeds.entry((usize::try_from(stage)?, version)).or_default();
            if is_stored {
                (done.stored, done.stored_of_other) = (all, of_other);
            } else {
                (done.settled, done.settled_of_other) = (all, of_other);
            }
        }
        Ok(deeds)
    }
}

/// A table with a line for each stage.
pub fn table(stages: &[Stage], deeds: &Deeds) -> String {
    let mut lines = String::from(
        "stage  phase                  instances      stored by old  by new  settled by old  by new  \
         of the other's: old  new\n",
    );
    for (number, stage) in stages.iter().enumerate() {
        let [old, new] =
            Version::BOTH.map(|v| deeds.get(&(number, v)).copied().unwrap_or_default());
        let of_other = |done: Done| done.stored_of_other + done.settled_of_other;
        lines.push_str(&format!(
            "{:>5}  {:<22} {:<13} {:>14} {:>7} {:>15} {:>7} {:>20} {:>4}\n",
            number + 1,
            stage.phase,
            stage.instances(),
            old.stored,
            new.stored,
            old.settled,
            new.settled,
            of_other(old),
            of_other(new),
        ));
    }
    lines
}

/// What the versions that ran in a stage did not do in it. Side by side with the other, a version has to go on with what
/// the other one began.
pub fn idle(number: usize, stage: &Stage, deeds: &Deeds) -> Vec<String> {
    let mut idle = Vec::new();
    for version in stage.versions() {
        let done = deeds.get(&(number, version)).copied().unwrap_or_default();
        let alone = [
            (done.stored, "stored nothing"),
            (done.settled, "settled nothing"),
        ];
        let beside = [
            (
                done.stored_of_other,
                "stored no failure of what the other had sent back",
            ),
            (
                done.settled_of_other,
                "settled nothing of what the other had stored",
            ),
        ];
        let beside = beside.into_iter().filter(|_| stage.is_mixed());
        let missing = alone
            .into_iter()
            .chain(beside)
            .find(|(count, _)| *count == 0);
        idle.extend(missing.map(|(_, what)| format!("the {} version {what}", version.name())));
    }
    idle
}

#[cfg(test)]
mod tests {
    use super::{super::plan::plan, *};

    const BUSY: Done = Done {
        stored: 30,
        stored_of_other: 4,
        settled: 20,
        settled_of_other: 3,
    };

    fn busy(stages: &[Stage]) -> Deeds {
        let numbered = stages.iter().enumerate();
        numbered
            .flat_map(|(number, stage)| stage.versions().map(move |v| ((number, v), BUSY)))
            .collect()
    }

    #[test]
    fn a_version_that_runs_and_does_nothing_is_named() {
        let stages = plan(2);
        let mut deeds = busy(&stages);
        for (number, stage) in stages.iter().enumerate() {
            assert_eq!(idle(number, stage, &deeds), [""; 0]);
        }
        deeds.remove(&(1, Version::Old));
        assert_eq!(
            idle(1, &stages[1], &deeds),
            ["the old version stored nothing"]
        );
        assert_eq!(idle(3, &stages[3], &deeds), [""; 0]);
    }

    #[test]
    fn side_by_side_each_version_must_go_on_with_what_the_other_began() {
        let stages = plan(2);
        let to_itself = Done {
            settled_of_other: 0,
            ..BUSY
        };
        let deeds = Deeds::from([
            ((1, Version::Old), BUSY),
            ((1, Version::New), to_itself),
            ((2, Version::New), to_itself),
        ]);
        assert_eq!(
            idle(1, &stages[1], &deeds),
            ["the new version settled nothing of what the other had stored"]
        );
        // Alone, it has nobody to take over from.
        assert_eq!(idle(2, &stages[2], &deeds), [""; 0]);
    }

    #[test]
    fn the_table_has_a_line_for_each_stage() {
        let stages = plan(2);
        let table = table(&stages, &busy(&stages));
        let lines: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(lines.len(), stages.len() + 1);
        let figures = ["30", "30", "20", "20", "7", "7"];
        assert!(lines[2].ends_with(&figures), "{table}");
    }
}
