//! The races: each contender alone, in several rounds, each round in another random order.

use std::time::Duration;

use anyhow::Context;
use bench::{
    field::{Field, progress},
    finding::quantile,
    inbox::Inbox,
    processor::Clock,
    producer::Load,
};
use tokio::time::sleep;

use crate::{
    contender::{Contender, Prepared},
    database::Database,
    lateness,
};

/// How long a contender is left alone after its start, before its memory counts as idle.
const IDLE: Duration = Duration::from_secs(1);

/// What was measured of one contender, one value a round.
pub struct Measured {
    pub contender: Contender,
    /// Messages a second.
    pub rate: Vec<f64>,
    /// Microseconds a message, of all processors.
    pub machine_cpu: Vec<f64>,
    pub postgres_cpu: Vec<f64>,
    pub own_cpu: Vec<f64>,
    /// Bytes a message, in Postgres's write-ahead log.
    pub wal: Vec<f64>,
    /// Megabytes.
    pub idle: Vec<f64>,
    pub peak: Vec<f64>,
    /// Milliseconds. Empty if messages cannot name a due moment.
    pub late_p50: Vec<f64>,
    pub late_p99: Vec<f64>,
}

impl Measured {
    fn of(contender: Contender) -> Self {
        Self {
            contender,
            rate: Vec::new(),
            machine_cpu: Vec::new(),
            postgres_cpu: Vec::new(),
            own_cpu: Vec::new(),
            wal: Vec::new(),
            idle: Vec::new(),
            peak: Vec::new(),
            late_p50: Vec::new(),
            late_p99: Vec::new(),
        }
    }
}

/// Runs all rounds. The result is in the order of `contenders`.
pub async fn all(
    field: &mut Field,
    database: &mut Database,
    contenders: Vec<Contender>,
) -> anyhow::Result<Vec<Measured>> {
    let mut inbox = field.inbox(1).await?;
    let mut prepared = Vec::new();
    let mut measured = Vec::new();
    for contender in contenders {
        prepared.push(contender.prepare(field).await?);
        measured.push(Measured::of(contender));
    }
    let rounds = field.rounds(3);
    for round in 1..=rounds {
        let mut order: Vec<usize> = (0..prepared.len()).collect();
        fastrand::shuffle(&mut order);
        for index in order {
            let title = prepared[index].contender.title();
            progress(&format!("round {round} of {rounds}: {title}"));
            let one = one(
                field,
                database,
                &prepared[index],
                &mut inbox,
                &mut measured[index],
            );
            Box::pin(one).await.context(title)?;
        }
    }
    Ok(measured)
}

/// Starts one contender, measures it, and stops it.
async fn one(
    field: &Field,
    database: &mut Database,
    prepared: &Prepared,
    inbox: &mut Inbox,
    measured: &mut Measured,
) -> anyhow::Result<()> {
    let load = Load {
        count: field.pick(5_000, 20_000),
        size: 1024,
        targets: 1,
    };
    let warm_up = Load {
        count: load.count / 10,
        ..load
    };
    let way = &prepared.way;
    let mut running = prepared.start(field).await?;
    sleep(IDLE).await;
    measured.idle.push(running.usage()?.resident_mb);
    field.race(way, warm_up, inbox).await?;
    running.until_settled(warm_up.count).await?;

    database.checkpoint().await?;
    let before = (Clock::read()?, running.usage()?, database.wal_end().await?);
    let rate = field.race(way, load, inbox).await?;
    running.until_settled(warm_up.count + load.count).await?;
    let after = (Clock::read()?, running.usage()?, database.wal_end().await?);
    let each = |total: f64| total / f64::from(load.count);
    let cost = before.0.until(&after.0, load.count);
    measured.rate.push(rate);
    measured.machine_cpu.push(cost.machine);
    measured.postgres_cpu.push(cost.postgres);
    let own = after.1.cpu.saturating_sub(before.1.cpu);
    measured.own_cpu.push(each(own.as_secs_f64() * 1e6));
    measured.wal.push(each(after.2 - before.2));
    measured.peak.push(after.1.peak_mb);

    if prepared.contender.has_due_moments() {
        let count = lateness::RATE * field.pick(3, 5);
        let late = lateness::measure(field, way, count, inbox).await?;
        measured.late_p50.push(quantile(&late, 0.5));
        measured.late_p99.push(quantile(&late, 0.99));
        if let Some(lane) = &way.lane {
            field.rows.until_settled(&lane.schema).await?;
        }
        running
            .until_settled(warm_up.count + load.count + count)
            .await?;
    }
    running.stop().await
}
