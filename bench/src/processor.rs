//! Measures processor time: that of the whole machine, of RabbitMQ and of Postgres.
//!
//! It comes from `/proc`. So services on another machine are not seen, and every RabbitMQ and
//! Postgres of this machine counts, not only those that are measured.

use std::{fs, time::Instant};

use anyhow::Context;

/// The processor time that the messages of one run took.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Microseconds of all processors for one message.
    pub machine: f64,
    /// RabbitMQ's part of `machine`.
    pub rabbitmq: f64,
    /// Postgres's part of `machine`.
    pub postgres: f64,
    /// Processors busy on average.
    pub busy: f64,
}

/// Processor seconds used up to a moment.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    at: Instant,
    machine: f64,
    rabbitmq: f64,
    postgres: f64,
}

impl Clock {
    pub fn read() -> anyhow::Result<Self> {
        let [mut rabbitmq, mut postgres] = [0.0; 2];
        for entry in fs::read_dir("/proc")? {
            // Not every entry is a process, and a process may end before its file is read. Its time
            // is then counted with its parent's.
            let Ok(stat) = fs::read_to_string(entry?.path().join("stat")) else {
                continue;
            };
            match named(&stat) {
                Some(("beam.smp", seconds)) => rabbitmq += seconds,
                Some(("postgres", seconds)) => postgres += seconds,
                _ => {}
            }
        }
        let stat = fs::read_to_string("/proc/stat").context("/proc/stat")?;
        Ok(Self {
            at: Instant::now(),
            machine: busy(&stat).context("/proc/stat has no line of all processors")?,
            rabbitmq,
            postgres,
        })
    }

    /// The cost of `count` messages that were handled between this reading and `end`.
    pub fn until(&self, end: &Self, count: u32) -> Cost {
        let each = |seconds: f64| seconds * 1e6 / f64::from(count);
        Cost {
            machine: each(end.machine - self.machine),
            rabbitmq: each(end.rabbitmq - self.rabbitmq),
            postgres: each(end.postgres - self.postgres),
            busy: (end.machine - self.machine) / end.at.duration_since(self.at).as_secs_f64(),
        }
    }
}

/// The processes that a process has started.
pub fn children(parent: u32) -> anyhow::Result<Vec<u32>> {
    let is_child = |process: &u32| {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        fields.split_whitespace().nth(1) == Some(&parent.to_string())
    };
    Ok(processes()?.into_iter().filter(is_child).collect())
}

/// The processes of this machine.
pub fn processes() -> anyhow::Result<Vec<u32>> {
    let entries = fs::read_dir("/proc")?.flatten();
    let names = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(names.collect())
}

/// The name of a process, and the seconds that it has used together with its children that have
/// ended. The kernel counts in hundredths of a second.
fn named(stat: &str) -> Option<(&str, f64)> {
    let (front, fields) = stat.rsplit_once(')')?;
    let (_, name) = front.split_once('(')?;
    let ticks = fields.split_whitespace().skip(11).take(4);
    let ticks: u64 = ticks.filter_map(|field| field.parse::<u64>().ok()).sum();
    Some((name, ticks as f64 / 100.0))
}

/// The seconds that all processors together were busy. Idle time and waiting for disks (the 4th
/// and 5th field) do not count, nor do guests (the last two), whose time is part of the first two.
fn busy(stat: &str) -> Option<f64> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks = fields.split_whitespace().take(8).enumerate();
    let ticks = ticks.filter(|(at, _)| !matches!(at, 3 | 4));
    let ticks: u64 = ticks
        .filter_map(|(_, field)| field.parse::<u64>().ok())
        .sum();
    Some(ticks as f64 / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_name_whatever_that_holds() {
        let stat = "42 (a (b) c) S 1 42 42 0 -1 4194560 1 2 3 4 100 50 25 25 20 0 1 0 9 8 7";
        assert_eq!(named(stat), Some(("a (b) c", 2.0)));
    }

    #[test]
    fn waiting_is_not_work() {
        let stat = "cpu  100 10 50 9000 900 5 15 20 7 7\ncpu0 1 2 3 4 5 6 7 8 9 10\n";
        assert_eq!(busy(stat), Some(2.0));
    }
}
