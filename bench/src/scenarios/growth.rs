//! Whether the service is as fast after millions of messages as it was at first.

use std::time::{Duration, Instant};

use crate::{
    field::{Field, Way, progress},
    finding::{Finding, Reach},
    producer::Load,
};

const NAME: &str = "growth";

pub async fn run(field: &mut Field) -> anyhow::Result<Vec<Finding>> {
    let total: u32 = field.pick(60_000, 5_000_000);
    let window = Duration::from_secs(field.pick(5, 60));
    let load = Load {
        count: field.pick(5_000, 25_000),
        size: 1024,
        targets: 1,
    };
    let lane = field.lane("growth").await?;
    let mut inbox = field.inbox(1).await?;
    let scheduler = field.scheduler(&lane, &[]).await?;
    let way = Way::through(&lane);
    field.race(&way, load, &mut inbox).await?;
    let began = Instant::now();
    let mut rates = Vec::new();
    for done in (0..total).step_by(load.count as usize) {
        progress(&format!("{NAME}: {done} of {total}"));
        let rate = field.race(&way, load, &mut inbox).await?;
        rates.push((began.elapsed(), rate));
    }
    let end = began.elapsed();
    let resident = scheduler.usage()?.resident_mb;
    scheduler.stop().await?;
    let within = |from: Duration, to: Duration| -> f64 {
        let rates = rates.iter().filter(|(at, _)| (from..=to).contains(at));
        let rates: Vec<f64> = rates.map(|(_, rate)| *rate).collect();
        rates.iter().sum::<f64>() / rates.len().max(1) as f64
    };
    let first = vec![within(Duration::ZERO, window)];
    let last = vec![within(end.saturating_sub(window), end)];
    let sizes = field.rows.sizes(&lane.schema).await?;
    let found = |what: &str, unit, sample| Finding::new(NAME, what, unit, vec![sample]);
    Ok(vec![
        Finding::new(NAME, "first minute", "messages/s", first.clone()),
        Finding::new(NAME, format!("last minute of {total}"), "messages/s", last)
            .against("first", &first)
            .reach(Reach::AtLeast(0.95)),
        found("tables", "MB", sizes.tables_mb),
        found("indexes", "MB", sizes.indexes_mb),
        found("dead rows", "rows", sizes.dead_rows),
        found("resident", "MB", resident),
    ])
}
