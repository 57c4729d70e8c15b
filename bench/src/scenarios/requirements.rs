//! The least that the service must do: 50 retries a second sustained, 200 a second in a burst,
//! and each retry within 5 seconds of the moment it is scheduled for.

use std::time::Duration;

use super::steady::{Due, Steady};
use crate::{
    field::{Field, Lane, progress},
    finding::{Finding, Reach},
    inbox::Inbox,
};

const NAME: &str = "requirements";

/// Messages a second.
const SUSTAINED: u32 = 50;
const BURST: u32 = 200;

const LATEST_MS: f64 = 5_000.0;

/// The share of the offered rate that counts as keeping it. The missing percent allows for the way
/// the rate is measured: if the last message is some milliseconds later than the first one was, the
/// messages arrived in a longer time than they were offered in, though nothing piled up.
const KEPT: f64 = 0.99;

/// How long before its due moment each message is published. A message that is stored only after
/// that moment is late.
const LEAD: Duration = Duration::from_millis(500);

/// What one stretch of messages at a steady rate showed.
struct Stretch {
    /// Messages a second, from the first arrival to the last.
    rate: f64,
    /// How long after its due moment the latest message arrived.
    latest_ms: f64,
}

pub async fn run(field: &mut Field) -> anyhow::Result<Vec<Finding>> {
    let lane = field.lane("requirements").await?;
    let mut inbox = field.inbox(1).await?;
    let scheduler = field.scheduler(&lane, &[]).await?;
    // Warm-up: each database connection prepares its statements when it first uses them.
    offer(field, &lane, &mut inbox, SUSTAINED, 1).await?;
    let rounds = field.rounds(2);
    let (mut sustained, mut burst, mut latest) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=rounds {
        progress(&format!("{NAME}: round {round} of {rounds}"));
        for (rates, rate, seconds) in [
            (&mut sustained, SUSTAINED, field.pick(4, 20)),
            (&mut burst, BURST, field.pick(2, 5)),
        ] {
            let stretch = offer(field, &lane, &mut inbox, rate, seconds).await?;
            rates.push(stretch.rate);
            latest.push(stretch.latest_ms);
        }
    }
    scheduler.stop().await?;
    let kept = |what: &str, rates: Vec<f64>, offered: u32| {
        let offered = vec![f64::from(offered); rates.len()];
        Finding::new(NAME, what, "messages/s", rates)
            .against("offered", &offered)
            .reach(Reach::AtLeast(KEPT))
    };
    // The limit holds for every message, so the worst round is judged and not the median of all.
    let worst = latest.into_iter().fold(f64::MIN, f64::max);
    let lateness = "lateness at the worst of both (at most 5 s)";
    Ok(vec![
        kept("50 a second, sustained", sustained, SUSTAINED),
        kept("200 a second, burst", burst, BURST),
        Finding::new(NAME, lateness, "ms", vec![worst]).reach(Reach::AtMost(LATEST_MS)),
    ])
}

/// Publishes `rate` messages a second, each with its own due moment, and waits until all of them
/// have arrived.
async fn offer(
    field: &Field,
    lane: &Lane,
    inbox: &mut Inbox,
    rate: u32,
    seconds: u32,
) -> anyhow::Result<Stretch> {
    let steady = Steady {
        rate,
        seconds,
        due: Due::Own { lead: LEAD },
    };
    let fates = steady.send(field, lane, inbox).await?;
    let came = || fates.iter().map(|fate| fate.arrived);
    let first = came().fold(f64::MAX, f64::min);
    let last = came().fold(f64::MIN, f64::max);
    let late_ms = fates.iter().map(|fate| (fate.arrived - fate.due) * 1e3);
    Ok(Stretch {
        rate: f64::from(rate * seconds - 1) / (last - first),
        latest_ms: late_ms.fold(f64::MIN, f64::max),
    })
}
