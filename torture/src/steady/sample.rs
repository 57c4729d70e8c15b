//! What is measured during a steady load, and whether it grew.

use std::sync::Arc;

use devstack::Stack;
use tokio::{sync::Mutex, task::spawn_blocking};

use crate::{
    instance::{SERVICE, Slot},
    rows::Rows,
};

/// How a figure may develop.
#[derive(Clone, Copy)]
enum Bound {
    /// The average of the last quarter may be that of the first times the first number, plus the second.
    Flat(f64, f64),
    /// No sample may be more than this.
    AtMost(f64),
}

/// One figure of each sample.
pub struct Column {
    name: String,
    bound: Bound,
}

/// All samples, each a line with a figure for each column.
pub struct Samples {
    columns: Vec<Column>,
    lines: Vec<Vec<f64>>,
}

impl Samples {
    /// The columns for so many instances, each with a pool of so many connections to Postgres.
    pub fn new(instances: usize, pool: u32) -> Self {
        let column = |name: &str, bound| Column {
            name: name.into(),
            bound,
        };
        let of_all = |each: u32| Bound::AtMost(f64::from(each) * instances as f64);
        let mut columns = Vec::new();
        for n in 0..instances {
            columns.push(column(&format!("RSS {n} MB"), Bound::Flat(1.1, 8.0)));
            columns.push(column(&format!("fds {n}"), Bound::Flat(1.1, 8.0)));
        }
        columns.extend([
            column("PG conns", of_all(pool)),
            column("MQ conns", Bound::Flat(1.0, 0.5)),
            column("MQ chans", Bound::Flat(1.0, 0.5)),
            column("waiting", Bound::Flat(1.25, 500.0)),
            column("live", Bound::Flat(1.25, 2000.0)),
            // Autovacuum runs once a minute, so this number rises and falls.
            column("dead", Bound::Flat(1.5, 20_000.0)),
            column("heap MB", Bound::Flat(1.25, 16.0)),
            column("TOAST MB", Bound::Flat(1.25, 64.0)),
            column("indexes MB", Bound::Flat(1.25, 16.0)),
        ]);
        Self {
            columns,
            lines: Vec::new(),
        }
    }

    /// Takes a sample, and returns it as a line to print.
    pub async fn take(
        &mut self,
        slots: &[Mutex<Slot>],
        stack: &Arc<Stack>,
        rows: &Rows,
    ) -> anyhow::Result<String> {
        let mut line = Vec::with_capacity(self.columns.len());
        for slot in slots {
            let pid = slot.lock().await.pid()?;
            line.push(testkit::memory_mb(pid, "VmRSS")?);
            line.push(std::fs::read_dir(format!("/proc/{pid}/fd"))?.count() as f64);
        }
        line.push(rows.connections().await?);
        line.extend(amqp(stack.clone()).await?);
        line.extend(rows.sizes().await?);
        let shown = self.columns.iter().zip(&line);
        let shown =
            shown.map(|(column, value)| format!("{value:>width$.0}", width = column.width()));
        let shown = shown.collect::<Vec<_>>().join("  ");
        self.lines.push(line);
        Ok(shown)
    }

    pub fn heading(&self) -> String {
        let names = self.columns.iter();
        let names = names.map(|c| format!("{:>width$}", c.name, width = c.width()));
        names.collect::<Vec<_>>().join("  ")
    }

    /// Judges all samples but the first `skip`. Returns a line for each figure, and how many figures have
    /// grown.
    pub fn judge(&self, skip: usize) -> (Vec<String>, usize) {
        let lines = self.lines.get(skip..).unwrap_or_default();
        let quarter = lines.len().div_ceil(4);
        let mean = |lines: &[Vec<f64>], n: usize| {
            lines.iter().map(|line| line[n]).sum::<f64>() / lines.len().max(1) as f64
        };
        let mut bad = 0;
        let mut judge = |(n, column): (usize, &Column)| {
            let first = mean(&lines[..quarter], n);
            let last = mean(&lines[lines.len() - quarter..], n);
            let most = lines.iter().map(|line| line[n]).fold(0.0, f64::max);
            let (good, rule) = match column.bound {
                Bound::Flat(times, more) => (
                    last <= first * times + more,
                    format!("at most {:.1} allowed", first * times + more),
                ),
                Bound::AtMost(bound) => (most <= bound, format!("never over {bound:.0}")),
            };
            let good = good && !lines.is_empty();
            bad += usize::from(!good);
            format!(
                "{:<10}  first quarter {first:>9.1}  last quarter {last:>9.1}  most {most:>9.1}  {} ({rule})",
                column.name,
                if good { "flat" } else { "GROWS" },
            )
        };
        let told = self.columns.iter().enumerate().map(&mut judge).collect();
        (told, bad)
    }
}

impl Column {
    fn width(&self) -> usize {
        self.name.len().max(6)
    }
}

/// How many connections the instances have to RabbitMQ, and how many channels on them.
async fn amqp(stack: Arc<Stack>) -> anyhow::Result<[f64; 2]> {
    let ask = ["list_connections", "channels", "client_properties"];
    let listed = spawn_blocking(move || stack.rabbitmq.ctl(&ask)).await??;
    let ours = listed.lines().filter(|line| line.contains(SERVICE));
    let channels: Vec<f64> = ours
        .filter_map(|line| line.split('\t').next()?.parse().ok())
        .collect();
    Ok([channels.len() as f64, channels.iter().sum()])
}
