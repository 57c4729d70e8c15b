//! Measures a changed service against an unchanged one in the same run, for tuning.

use std::path::PathBuf;

use futures::future::try_join_all;

use crate::{
    field::{Field, Way},
    finding::Finding,
    processor::Cost,
    producer::Load,
    scheduler::Scheduler,
};

const NAME: &str = "versus";

/// What is changed.
#[derive(Clone, Debug)]
pub enum Change {
    Settings(Vec<(String, String)>),
    Binary(PathBuf),
    /// A statement that is run in the schema once the tables are created.
    Sql(String),
}

impl Change {
    /// Reads `sql:…`, a path (anything with a slash), or `NAME=VALUE,NAME=VALUE`.
    pub fn parse(text: &str) -> Self {
        if let Some(sql) = text.strip_prefix("sql:") {
            return Self::Sql(sql.to_owned());
        }
        if text.contains('/') {
            return Self::Binary(text.into());
        }
        let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
        Self::Settings(pairs.map(|(n, v)| (n.to_owned(), v.to_owned())).collect())
    }
}

/// Measures the rate without a change, and with each of the changes.
pub async fn run(
    field: &mut Field,
    changes: &[String],
    targets: u32,
) -> anyhow::Result<Vec<Finding>> {
    let load = Load {
        count: field.pick(10_000, 50_000),
        size: 1024,
        targets,
    };
    let mut inbox = field.inbox(targets).await?;
    let unchanged = field.lane("unchanged").await?;
    let mut ways = vec![Way::through(&unchanged)];
    let mut schedulers = vec![field.scheduler(&unchanged, &[]).await?];
    for (number, change) in changes.iter().enumerate() {
        let lane = field.lane(&format!("change_{number}")).await?;
        let mut setup = field.setup.clone();
        match Change::parse(change) {
            Change::Settings(settings) => setup.settings.extend(settings),
            Change::Binary(binary) => setup.binary = binary,
            Change::Sql(sql) => {
                field.scheduler(&lane, &[]).await?.stop().await?;
                field.rows.run_in(&lane.schema, &sql).await?;
            }
        }
        schedulers.push(Scheduler::start(&setup, &lane.schema, &lane.intake, &[]).await?);
        ways.push(Way::through(&lane));
    }
    let rounds = field.rounds(7);
    let raced = field.races(NAME, &ways, load, rounds, &mut inbox).await?;
    try_join_all(schedulers.into_iter().map(|s| s.stop())).await?;
    let mut findings = Vec::new();
    let names = std::iter::once("unchanged").chain(changes.iter().map(String::as_str));
    for (what, way) in names.zip(&raced) {
        let rate = Finding::new(NAME, what, "messages/s", way.rates.clone());
        let cost = |of: &str, part: fn(&Cost) -> f64| {
            let samples = way.costs.iter().map(part).collect();
            Finding::new(NAME, format!("{what}: all CPU{of}"), "µs/message", samples)
        };
        findings.extend([
            rate.against("unchanged", &raced[0].rates),
            cost("", |cost| cost.machine),
            cost(", Postgres of it", |cost| cost.postgres),
        ]);
    }
    Ok(findings)
}
