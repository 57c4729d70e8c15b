//! How many messages a second pass, from the first publish to the last arrival.

use lapin::types::FieldTable;

use crate::{
    field::{DELAY, Field, RELAY, Way},
    finding::{Finding, Reach},
    floor::{Relay, into_first_target},
    producer::Load,
};

const RATE: &str = "messages/s";

/// 1 KiB to one queue, against both floors.
pub async fn run(field: &mut Field) -> anyhow::Result<Vec<Finding>> {
    const NAME: &str = "throughput";
    let load = Load {
        count: field.pick(10_000, 50_000),
        size: 1024,
        targets: 1,
    };
    let rates = against_floors(field, NAME, load, true, 5).await?;
    let [ours, relay, delay] = &rates[..] else {
        return Ok(Vec::new());
    };
    Ok(vec![
        Finding::new(NAME, "relay without a database", RATE, relay.clone()),
        Finding::new(NAME, "TTL/DLX delay queue", RATE, delay.clone()),
        Finding::new(NAME, "1 KiB to 1 queue", RATE, ours.clone())
            .against("relay", relay)
            .reach(Reach::AtLeast(0.95)),
        Finding::new(NAME, "1 KiB to 1 queue", RATE, ours.clone())
            .against("TTL/DLX", delay)
            .reach(Reach::AtLeast(0.6)),
    ])
}

/// Small and large messages, against the relay.
pub async fn sizes(field: &mut Field) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for (what, size, quick, full) in [
        ("64 B to 1 queue", 64, 10_000, 50_000),
        ("16 KiB to 1 queue", 16 << 10, 2_000, 10_000),
        ("256 KiB to 1 queue", 256 << 10, 150, 1_000),
    ] {
        let load = Load {
            count: field.pick(quick, full),
            size,
            targets: 1,
        };
        findings.extend(against_relay(field, "sizes", what, load).await?);
    }
    Ok(findings)
}

/// Many target queues, against the relay.
pub async fn queues(field: &mut Field) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for (what, targets) in [("1 KiB to 10 queues", 10), ("1 KiB to 1,000 queues", 1000)] {
        let load = Load {
            count: field.pick(10_000, 50_000),
            size: 1024,
            targets,
        };
        findings.extend(against_relay(field, "queues", what, load).await?);
    }
    Ok(findings)
}

async fn against_relay(
    field: &mut Field,
    name: &'static str,
    what: &str,
    load: Load,
) -> anyhow::Result<Vec<Finding>> {
    let rates = against_floors(field, what, load, false, 3).await?;
    let [ours, relay] = &rates[..] else {
        return Ok(Vec::new());
    };
    let relayed = format!("{what}, relay");
    Ok(vec![
        Finding::new(name, relayed, RATE, relay.clone()),
        Finding::new(name, what, RATE, ours.clone())
            .against("relay", relay)
            .reach(Reach::AtLeast(0.9)),
    ])
}

/// The rates of ours, of the relay, and if asked for of the delay queue.
async fn against_floors(
    field: &mut Field,
    name: &str,
    load: Load,
    delay_queue: bool,
    rounds: usize,
) -> anyhow::Result<Vec<Vec<f64>>> {
    let rounds = field.rounds(rounds);
    let mut inbox = field.inbox(load.targets).await?;
    let lane = field.lane("throughput").await?;
    field.queue(RELAY, FieldTable::default()).await?;
    let mut ways = vec![Way::through(&lane), Way::relay()];
    if delay_queue {
        field.queue(DELAY, into_first_target()).await?;
        ways.push(Way::delay_queue());
    }
    let scheduler = field.scheduler(&lane, &[]).await?;
    let _relay = Relay::start(&field.setup.rabbitmq_url, &field.channel).await?;
    let rates = field.races(name, &ways, load, rounds, &mut inbox).await?;
    scheduler.stop().await?;
    Ok(rates)
}
