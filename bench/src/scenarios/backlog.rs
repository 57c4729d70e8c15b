//! Rate, lateness and memory with many rows that wait for tomorrow, against an empty table.

use anyhow::ensure;

use super::drift::{self, DELAY_MS};
use crate::{
    field::{Field, Way, progress},
    finding::{Finding, Reach, quantile},
    producer::Load,
};

const NAME: &str = "backlog";

pub async fn run(field: &mut Field) -> anyhow::Result<Vec<Finding>> {
    let waiting: u32 = field.pick(200_000, 10_000_000);
    let empty = field.lane("empty").await?;
    let full = field.lane("backlog").await?;
    let mut inbox = field.inbox(1).await?;
    // This start only creates the tables.
    field.scheduler(&full, &[]).await?.stop().await?;
    field
        .rows
        .backlog(&full.schema, waiting, |so_far| {
            progress(&format!("{NAME}: {so_far} of {waiting} rows put"));
        })
        .await?;
    let plan = field.rows.claim_plan(&full.schema).await?;
    ensure!(
        plan.contains("Index Scan using idx_retry_due_next") && !plan.contains("Seq Scan"),
        "the claim does not use its index:\n{plan}"
    );
    let scheduler = field.scheduler(&empty, &[]).await?;
    let burdened = field.scheduler(&full, &[]).await?;

    let load = Load {
        count: field.pick(6_000, 50_000),
        size: 1024,
        targets: 1,
    };
    let ways = [Way::through(&empty), Way::through(&full)];
    let rounds = field.rounds(3);
    let raced = field.races(NAME, &ways, load, rounds, &mut inbox).await?;
    let memory = burdened.usage()?.peak_mb;
    scheduler.stop().await?;
    burdened.stop().await?;

    let late = [("BASE_DELAY_MS", DELAY_MS)];
    let scheduler = field.scheduler(&empty, &late).await?;
    let burdened = field.scheduler(&full, &late).await?;
    let seconds = field.pick(2, 15);
    let mut p99 = [Vec::new(), Vec::new()];
    for round in 1..=rounds {
        progress(&format!("{NAME}: drift, round {round} of {rounds}"));
        for (lane, p99) in [&empty, &full].into_iter().zip(&mut p99) {
            let drift = drift::measure(field, lane, &mut inbox, seconds).await?;
            p99.push(quantile(&drift.settled, 0.99));
        }
    }
    scheduler.stop().await?;
    burdened.stop().await?;

    let [of_empty, of_full] = &raced[..] else {
        return Ok(Vec::new());
    };
    let [of_empty, of_full] = [&of_empty.rates, &of_full.rates];
    let [late_of_empty, late_of_full] = p99;
    let with = format!("with {waiting} rows waiting");
    Ok(vec![
        Finding::new(NAME, "empty table", "messages/s", of_empty.clone()),
        Finding::new(NAME, with.clone(), "messages/s", of_full.clone())
            .against("empty", of_empty)
            .reach(Reach::AtLeast(0.9)),
        Finding::new(NAME, "p99 drift, empty table", "ms", late_of_empty.clone()),
        Finding::new(NAME, format!("p99 drift {with}"), "ms", late_of_full)
            .against("empty", &late_of_empty)
            .reach(Reach::AtMost(2.0)),
        Finding::new(NAME, format!("peak memory {with}"), "MB", vec![memory])
            .reach(Reach::AtMost(64.0)),
    ])
}
