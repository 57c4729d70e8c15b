//! What the service uses: time to start; memory and processor time when idle and at full rate.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::{
    field::{Field, Way, progress},
    finding::{Finding, Reach},
    producer::Load,
};

const NAME: &str = "footprint";

/// Postgres may count the last transactions of a connection up to ten seconds after the connection
/// has fallen idle. The wait is longer, so that the work of the start does not count as idle work.
const COUNTERS_LATE: Duration = Duration::from_secs(12);

pub async fn run(field: &mut Field) -> anyhow::Result<Vec<Finding>> {
    let lane = field.lane("footprint").await?;
    let mut inbox = field.inbox(1).await?;
    // The first start creates the tables, which takes longer: it is not measured.
    field.scheduler(&lane, &[]).await?.stop().await?;
    let mut starts = Vec::new();
    for round in 1..=field.rounds(5) {
        progress(&format!("{NAME}: start {round}"));
        let scheduler = field.scheduler(&lane, &[]).await?;
        starts.push(scheduler.ready_after.as_secs_f64() * 1e3);
        scheduler.stop().await?;
    }

    let scheduler = field.scheduler(&lane, &[]).await?;
    sleep(COUNTERS_LATE).await;
    let (mut idle_cpu, mut idle_queries, mut idle_mb) = (Vec::new(), Vec::new(), Vec::new());
    let window = Duration::from_secs(field.pick(10, 30));
    for round in 1..=2 {
        progress(&format!("{NAME}: idle, round {round} of 2"));
        let before = (scheduler.usage()?, field.rows.transactions().await?);
        let began = Instant::now();
        sleep(window).await;
        let after = (scheduler.usage()?, field.rows.transactions().await?);
        let seconds = began.elapsed().as_secs_f64();
        idle_cpu.push((after.0.cpu - before.0.cpu).as_secs_f64() / seconds * 100.0);
        // One of the transactions is our own query.
        idle_queries.push((after.1 - before.1 - 1.0) / seconds);
        idle_mb.push(after.0.resident_mb);
    }

    let load = Load {
        count: field.pick(10_000, 50_000),
        size: 1024,
        targets: 1,
    };
    let way = Way::through(&lane);
    let (mut busy_cpu, mut busy_mb) = (Vec::new(), Vec::new());
    let rounds = field.rounds(3);
    for round in 1..=rounds {
        progress(&format!("{NAME}: full rate, round {round} of {rounds}"));
        let before = scheduler.usage()?;
        field.race(&way, load, &mut inbox).await?;
        let after = scheduler.usage()?;
        busy_cpu.push((after.cpu - before.cpu).as_secs_f64() * 1e6 / f64::from(load.count));
        busy_mb.push(after.peak_mb);
    }
    scheduler.stop().await?;
    let at_most = Reach::AtMost;
    let found = |what: &str, unit, samples| Finding::new(NAME, what, unit, samples);
    Ok(vec![
        found("start to /ready", "ms", starts).reach(at_most(500.0)),
        found("idle: resident", "MB", idle_mb).reach(at_most(40.0)),
        found("idle: CPU", "% of a core", idle_cpu).reach(at_most(0.5)),
        found("idle: transactions", "1/s", idle_queries).reach(at_most(2.0)),
        found("full rate: peak resident", "MB", busy_mb).reach(at_most(120.0)),
        found("full rate: own CPU", "µs/message", busy_cpu),
    ])
}
