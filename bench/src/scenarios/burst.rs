//! Many messages due at one instant: how fast they are sent back, and how long the messages of
//! another queue take meanwhile.

use std::{
    cell::Cell,
    time::{Duration, Instant, SystemTime},
};

use tokio::time::sleep;

use crate::{
    field::{Field, Lane, Way, progress, target},
    finding::{Finding, Reach},
    inbox::Inbox,
    producer::Load,
    rows::epoch,
};

const NAME: &str = "burst";

/// How often a message is sent to the other queue while the burst drains.
const PROBE_EVERY: Duration = Duration::from_millis(250);

/// The numbers of the burst's target queue and of the other one.
const BURST: u32 = 0;
const OTHER: u32 = 1;

pub async fn run(field: &mut Field) -> anyhow::Result<Vec<Finding>> {
    let count: u32 = field.pick(10_000, 100_000);
    let lane = field.lane("burst").await?;
    let mut inbox = field.inbox_of(BURST..BURST + 1).await?;
    let mut other = field.inbox_of(OTHER..OTHER + 1).await?;
    let scheduler = field.scheduler(&lane, &[]).await?;
    let load = Load {
        count: field.pick(10_000, 50_000),
        size: 1024,
        targets: 1,
    };
    let way = Way::through(&lane);
    field
        .race(
            &way,
            Load {
                count: 1000,
                ..load
            },
            &mut inbox,
        )
        .await?;
    let rounds = field.rounds(3);
    let (mut steady, mut drained, mut slowest) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=rounds {
        progress(&format!("{NAME}: round {round} of {rounds}"));
        steady.push(field.race(&way, load, &mut inbox).await?);
        let (rate, latency) = drain(field, &lane, count, &mut inbox, &mut other).await?;
        drained.push(rate);
        slowest.push(latency);
    }
    scheduler.stop().await?;
    let of = format!("{count} due at one instant");
    Ok(vec![
        Finding::new(NAME, "steady rate", "messages/s", steady.clone()),
        Finding::new(NAME, of, "messages/s", drained)
            .against("steady", &steady)
            .reach(Reach::AtLeast(0.9)),
        Finding::new(NAME, "slowest on another queue meanwhile", "ms", slowest)
            .reach(Reach::AtMost(1000.0)),
    ])
}

/// Returns the messages a second of the burst, counted from their due moment, and the time from
/// publish to arrival of the slowest message to the other queue, in ms.
async fn drain(
    field: &Field,
    lane: &Lane,
    count: u32,
    inbox: &mut Inbox,
    other: &mut Inbox,
) -> anyhow::Result<(f64, f64)> {
    let run = field.run();
    let ahead = field.rows.clock_ahead().await?;
    let queue = target(BURST);
    let due = field.rows.burst(&lane.schema, run, count, &queue).await? - ahead;
    let wait = Duration::from_secs_f64((due - epoch(SystemTime::now())).max(0.0));
    let drained = Cell::new(false);
    let draining = async {
        let arrived = inbox.collect(run, count).await;
        drained.set(true);
        arrived
    };
    let probing = async {
        sleep(wait).await;
        let mut slowest = Duration::ZERO;
        while !drained.get() {
            let (probe, sent) = (field.run(), Instant::now());
            field
                .producer
                .send_one(&lane.intake, probe, 0, OTHER)
                .await?;
            let came = other.collect(probe, 1).await?.last;
            slowest = slowest.max(came.duration_since(sent));
            sleep(PROBE_EVERY.saturating_sub(sent.elapsed())).await;
        }
        Ok(slowest)
    };
    let (arrived, slowest) = tokio::try_join!(draining, probing)?;
    field.rows.until_settled(&lane.schema).await?;
    inbox.nothing_more()?;
    let last = arrived.wall.iter().max().map_or(due, |last| epoch(*last));
    let rate = f64::from(count) / (last - due).max(1e-3);
    Ok((rate, slowest.as_secs_f64() * 1e3))
}
