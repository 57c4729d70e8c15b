//! Drift: how late messages are, counted from the due moment in their rows.

use std::time::Duration;

use super::steady::{Due, Steady};
use crate::{
    field::{Field, Lane, progress},
    finding::{Finding, Reach, quantile},
    inbox::Inbox,
};

const NAME: &str = "drift";

/// Messages a second, where the policy says when they are due.
const RATE: u32 = 500;

/// Messages a second, where each message has its own due moment. At a gentle pace a worker claims
/// one row at a time, and all that it does between two rows shows.
const PACES: [u32; 4] = [20, 200, 500, 2000];

/// How long before its own due moment a message is published.
const LEAD: Duration = Duration::from_secs(2);

/// How late the slowest percent of messages with their own due moments may be.
const LATEST_MS: f64 = 8.0;

/// How long each message waits: long enough that it is stored before it is due, so that only the
/// dispatcher can make it late.
pub const DELAY_MS: &str = "500";

/// How late the messages of one round were, in milliseconds.
pub struct Drift {
    /// Until the row was settled. Both moments are of Postgres's clock.
    pub settled: Vec<f64>,
    /// Until the consumer received the message.
    pub arrived: Vec<f64>,
}

pub async fn run(field: &mut Field) -> anyhow::Result<Vec<Finding>> {
    let lane = field.lane("drift").await?;
    let mut inbox = field.inbox(1).await?;
    let scheduler = field
        .scheduler(&lane, &[("BASE_DELAY_MS", DELAY_MS)])
        .await?;
    let seconds = field.pick(5, 30);
    measure(field, &lane, &mut inbox, 1).await?;
    let rounds = field.rounds(3);
    let mut drifts = Vec::new();
    for round in 1..=rounds {
        progress(&format!("{NAME}: round {round} of {rounds}"));
        drifts.push(measure(field, &lane, &mut inbox, seconds).await?);
    }
    let mut paces = Vec::new();
    for rate in PACES {
        paces.extend(own_due_moments(field, &lane, &mut inbox, rate).await?);
    }
    scheduler.stop().await?;
    let quantiles = |of: fn(&Drift) -> &Vec<f64>, q| -> Vec<f64> {
        drifts.iter().map(|drift| quantile(of(drift), q)).collect()
    };
    let at_most = Reach::AtMost;
    let mut findings = vec![
        ms("p50 until settled", quantiles(|d| &d.settled, 0.5)).reach(at_most(5.0)),
        ms("p99 until settled", quantiles(|d| &d.settled, 0.99)).reach(at_most(50.0)),
        ms("p50 at the consumer", quantiles(|d| &d.arrived, 0.5)).reach(at_most(5.0)),
        ms("p99 at the consumer", quantiles(|d| &d.arrived, 0.99)).reach(at_most(50.0)),
        ms("earliest at the consumer", quantiles(|d| &d.arrived, 0.0)).reach(Reach::AtLeast(0.0)),
    ];
    findings.extend(paces);
    Ok(findings)
}

fn ms(what: &str, samples: Vec<f64>) -> Finding {
    Finding::new(NAME, what, "ms", samples)
}

/// Measures messages at an even pace, each with its own due moment, until they are settled.
async fn own_due_moments(
    field: &Field,
    lane: &Lane,
    inbox: &mut Inbox,
    rate: u32,
) -> anyhow::Result<[Finding; 2]> {
    let pace = Steady {
        rate,
        seconds: field.pick(3, 20),
        due: Due::Own { lead: LEAD },
    };
    let (mut p50, mut p99) = (Vec::new(), Vec::new());
    let rounds = field.rounds(3);
    for round in 1..=rounds {
        progress(&format!("{NAME}: {rate}/s, round {round} of {rounds}"));
        let drift = Drift::of(pace, field, lane, inbox).await?;
        p50.push(quantile(&drift.settled, 0.5));
        p99.push(quantile(&drift.settled, 0.99));
    }
    let name = |what| format!("{rate}/s, each due on its own: {what} until settled");
    Ok([
        ms(&name("p50"), p50),
        ms(&name("p99"), p99).reach(Reach::AtMost(LATEST_MS)),
    ])
}

/// Sends messages at a steady rate for some seconds, and returns how late each of them was.
pub async fn measure(
    field: &Field,
    lane: &Lane,
    inbox: &mut Inbox,
    seconds: u32,
) -> anyhow::Result<Drift> {
    let steady = Steady {
        rate: RATE,
        seconds,
        due: Due::ByPolicy,
    };
    Drift::of(steady, field, lane, inbox).await
}

impl Drift {
    async fn of(
        steady: Steady,
        field: &Field,
        lane: &Lane,
        inbox: &mut Inbox,
    ) -> anyhow::Result<Self> {
        let fates = steady.send(field, lane, inbox).await?;
        Ok(Self {
            settled: fates.iter().map(|f| (f.settled - f.due) * 1e3).collect(),
            arrived: fates.iter().map(|f| (f.arrived - f.due) * 1e3).collect(),
        })
    }
}
