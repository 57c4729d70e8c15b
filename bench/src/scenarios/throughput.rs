//! How many messages a second pass, from the first publish to the last arrival.

use lapin::types::FieldTable;

use crate::{
    cores::Apart,
    field::{DELAY, Field, RELAY, Raced, Way, progress},
    finding::{Finding, Reach},
    floor::{Relay, into_first_target},
    processor::Cost,
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
    let raced = against_floors(field, NAME, load, true, 5).await?;
    let [ours, relay, delay] = &raced[..] else {
        return Ok(Vec::new());
    };
    let rate = |what: &str, way: &Raced| Finding::new(NAME, what, RATE, way.rates.clone());
    let mut findings = vec![
        rate("relay without a database", relay),
        rate("TTL/DLX delay queue", delay),
        rate("1 KiB to 1 queue", ours)
            .against("relay", &relay.rates)
            .reach(Reach::AtLeast(0.95)),
        rate("1 KiB to 1 queue", ours)
            .against("TTL/DLX", &delay.rates)
            .reach(Reach::AtLeast(0.6)),
        cost(NAME, "all CPU, TTL/DLX".into(), delay, |cost| cost.machine),
    ];
    findings.extend(costs(NAME, "1 KiB to 1 queue", &raced));
    let busy = ours.costs.iter().map(|cost| cost.busy).collect();
    findings.push(Finding::new(NAME, "cores busy with ours", "cores", busy));
    Ok(findings)
}

/// Small and large messages, against the relay.
pub async fn sizes(field: &mut Field) -> anyhow::Result<Vec<Finding>> {
    const NAME: &str = "sizes";
    let mut findings = Vec::new();
    for (what, load) in SIZES.map(|(size, quick, full)| load_of(field, size, quick, full)) {
        let raced = against_floors(field, &what, load, false, 3).await?;
        findings.extend(against_relay(NAME, &what, &raced, 0.9));
        findings.extend(costs(NAME, &what, &raced));
    }
    Ok(findings)
}

/// Many target queues, against the relay.
pub async fn queues(field: &mut Field) -> anyhow::Result<Vec<Finding>> {
    const NAME: &str = "queues";
    let mut findings = Vec::new();
    for (what, targets) in [("1 KiB to 10 queues", 10), ("1 KiB to 1,000 queues", 1000)] {
        let load = Load {
            count: field.pick(10_000, 50_000),
            size: 1024,
            targets,
        };
        let raced = against_floors(field, what, load, false, 3).await?;
        findings.extend(against_relay(NAME, what, &raced, 0.9));
        findings.extend(costs(NAME, what, &raced));
    }
    Ok(findings)
}

/// All sizes, with Postgres on a core of its own. Its work then takes nothing from the core of the
/// broker, which the relay and the service need alike.
pub async fn apart(field: &mut Field) -> anyhow::Result<Vec<Finding>> {
    const NAME: &str = "apart";
    let Some(_apart) = Apart::arrange(&field.setup)? else {
        progress(&format!("{NAME}: needs two cores and both services here"));
        return Ok(Vec::new());
    };
    let mut findings = Vec::new();
    let kibibyte = (1 << 10, 10_000, 30_000);
    for size in [SIZES[0], kibibyte, SIZES[1], SIZES[2]] {
        let (what, load) = load_of(field, size.0, size.1, size.2);
        let raced = against_floors(field, &format!("{NAME}: {what}"), load, false, 3).await?;
        let reach = if size == kibibyte { 0.95 } else { 0.9 };
        findings.extend(against_relay(NAME, &what, &raced, reach));
    }
    Ok(findings)
}

/// Sizes of messages, and how many of them in the quick and in the full form.
const SIZES: [(usize, u32, u32); 3] = [
    (64, 10_000, 50_000),
    (16 << 10, 2_000, 10_000),
    (256 << 10, 150, 1_000),
];

fn load_of(field: &Field, size: usize, quick: u32, full: u32) -> (String, Load) {
    let load = Load {
        count: field.pick(quick, full),
        size,
        targets: 1,
    };
    let size = match size {
        bytes @ ..1024 => format!("{bytes} B"),
        bytes => format!("{} KiB", bytes >> 10),
    };
    (format!("{size} to 1 queue"), load)
}

fn against_relay(name: &'static str, what: &str, raced: &[Raced], reach: f64) -> Vec<Finding> {
    let [ours, relay, ..] = raced else {
        return Vec::new();
    };
    vec![
        Finding::new(name, format!("{what}, relay"), RATE, relay.rates.clone()),
        Finding::new(name, what, RATE, ours.rates.clone())
            .against("relay", &relay.rates)
            .reach(Reach::AtLeast(reach)),
    ]
}

/// The processor time of a message. It explains how much slower the service is than the relay: when
/// all processors are busy, the rate is limited by what one message takes of them.
fn costs(name: &'static str, what: &str, raced: &[Raced]) -> Vec<Finding> {
    let [ours, relay, ..] = raced else {
        return Vec::new();
    };
    let cost = |of: &str, way, part| cost(name, format!("{what}: all CPU, {of}"), way, part);
    vec![
        cost("relay", relay, |cost| cost.machine),
        cost("ours", ours, |cost| cost.machine),
        cost("ours, RabbitMQ of it", ours, |cost| cost.rabbitmq),
        cost("ours, Postgres of it", ours, |cost| cost.postgres),
    ]
}

fn cost(name: &'static str, what: String, way: &Raced, part: fn(&Cost) -> f64) -> Finding {
    let samples = way.costs.iter().map(part).collect();
    Finding::new(name, what, "µs/message", samples)
}

/// Measures the service and the relay, and the TTL/DLX queue if `delay_queue` is set; the result is
/// in this order.
async fn against_floors(
    field: &mut Field,
    name: &str,
    load: Load,
    delay_queue: bool,
    rounds: usize,
) -> anyhow::Result<Vec<Raced>> {
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
    let raced = field.races(name, &ways, load, rounds, &mut inbox).await?;
    scheduler.stop().await?;
    Ok(raced)
}
