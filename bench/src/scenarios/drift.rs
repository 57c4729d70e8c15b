//! Drift: how late messages are, counted from the due moment in their rows.

use std::time::Duration;

use anyhow::ensure;
use tokio::time::{MissedTickBehavior, interval};

use crate::{
    field::{Field, Lane, progress},
    finding::{Finding, Reach, quantile},
    inbox::Inbox,
    rows::epoch,
};

const NAME: &str = "drift";

/// Messages a second.
const RATE: u32 = 500;

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
    scheduler.stop().await?;
    let quantiles = |of: fn(&Drift) -> &Vec<f64>, q| -> Vec<f64> {
        drifts.iter().map(|drift| quantile(of(drift), q)).collect()
    };
    let ms = |what: &str, samples| Finding::new(NAME, what, "ms", samples);
    let at_most = Reach::AtMost;
    Ok(vec![
        ms("p50 until settled", quantiles(|d| &d.settled, 0.5)).reach(at_most(5.0)),
        ms("p99 until settled", quantiles(|d| &d.settled, 0.99)).reach(at_most(50.0)),
        ms("p50 at the consumer", quantiles(|d| &d.arrived, 0.5)).reach(at_most(5.0)),
        ms("p99 at the consumer", quantiles(|d| &d.arrived, 0.99)).reach(at_most(50.0)),
        ms("earliest at the consumer", quantiles(|d| &d.arrived, 0.0)).reach(Reach::AtLeast(0.0)),
    ])
}

/// Sends messages at a steady rate for some seconds, and returns how late each of them was.
pub async fn measure(
    field: &Field,
    lane: &Lane,
    inbox: &mut Inbox,
    seconds: u32,
) -> anyhow::Result<Drift> {
    let (run, count) = (field.run(), RATE * seconds);
    let ahead = field.rows.clock_ahead().await?;
    let send = async {
        let mut ticks = interval(Duration::from_secs(1) / RATE);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        for number in 0..count {
            ticks.tick().await;
            field
                .producer
                .send_one(&lane.intake, run, number, 0)
                .await?;
        }
        anyhow::Ok(())
    };
    let ((), arrived) = tokio::try_join!(send, inbox.collect(run, count))?;
    field.rows.until_settled(&lane.schema).await?;
    inbox.nothing_more()?;
    let times = field.rows.times(&lane.schema, run).await?;
    ensure!(times.len() == count as usize, "rows are missing");
    let mut drift = Drift {
        settled: Vec::with_capacity(times.len()),
        arrived: Vec::with_capacity(times.len()),
    };
    for time in times {
        let came = epoch(arrived.wall[time.number as usize]) + ahead;
        drift.settled.push((time.settled - time.due) * 1e3);
        drift.arrived.push((came - time.due) * 1e3);
    }
    Ok(drift)
}
