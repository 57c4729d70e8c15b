//! `import`: takes over what waits in another scheduler's table.

use anyhow::ensure;
use clap::Args;

use crate::{
    app,
    config::Settings,
    intake::{Import, Imported},
    store::Store,
};

/// How many of the rows that were left are named one by one.
const NAMED: usize = 20;

#[derive(Debug, Args)]
pub(super) struct From {
    /// The schema of the other scheduler's table.
    #[arg(long, default_value = "public", value_name = "SCHEMA")]
    from_schema: String,
    /// The other scheduler's table.
    #[arg(long, default_value = "retry_queue")]
    table: String,
    /// The time zone of its times, where their type has none.
    #[arg(long, default_value = "UTC", value_name = "ZONE")]
    time_zone: String,
    /// The most rows of one transaction.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    batch: i64,
}

impl From {
    pub(super) async fn run(self, settings: &Settings) -> anyhow::Result<()> {
        let store = Store::open(settings, "import")?;
        if settings.migrate_on_start {
            store.migrate().await?;
        }
        store.ping().await?;
        let source = store
            .source(&self.from_schema, &self.table, &self.time_zone)
            .await?;
        let counts = store.statuses_in(&source).await?;
        let waiting = counts.iter().find(|(status, _)| status == "pending");
        let waiting = waiting.map_or(0, |(_, count)| *count);
        let shown: Vec<String> = counts.iter().map(|(s, n)| format!("{n} {s}")).collect();
        println!(
            "{}.{}: {}",
            self.from_schema,
            self.table,
            match shown.is_empty() {
                true => "no rows".to_owned(),
                false => shown.join(", "),
            }
        );
        let import = Import {
            store,
            rules: app::rules(settings, app::policy_book(settings)?),
            source,
            batch: self.batch,
        };
        let mut all = Imported::default();
        loop {
            let batch = import.run_once(all.last.unwrap_or(i64::MIN)).await?;
            let Some(last) = batch.last else { break };
            all.last = Some(last);
            all.taken += batch.taken;
            all.to_review += batch.to_review;
            all.left.extend(batch.left);
            println!("taken over {} of {waiting}", all.taken);
        }
        report(&all)
    }
}

fn report(all: &Imported) -> anyhow::Result<()> {
    println!(
        "Taken over: {}, of which {} go to review. Left where they were: {}.",
        all.taken,
        all.to_review,
        all.left.len()
    );
    for (message_id, why) in all.left.iter().take(NAMED) {
        println!("left: {message_id}: {why}");
    }
    if all.left.len() > NAMED {
        println!("left: and {} more", all.left.len() - NAMED);
    }
    ensure!(
        all.left.is_empty(),
        "{} rows were not taken over",
        all.left.len()
    );
    Ok(())
}
