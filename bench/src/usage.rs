//! The memory and the processor time that a process uses.

use std::{ops::Add, time::Duration};

use crate::processor;

#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub resident_mb: f64,
    pub peak_mb: f64,
    pub cpu: Duration,
}

impl Add for Usage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            resident_mb: self.resident_mb + other.resident_mb,
            peak_mb: self.peak_mb + other.peak_mb,
            cpu: self.cpu + other.cpu,
        }
    }
}

impl Usage {
    pub fn of(process: u32) -> anyhow::Result<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
        // The name, in parentheses, may contain spaces, so fields are counted from its end. User
        // and system time are the 14th and 15th field of the line, in hundredths of a second.
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        let ticks: u64 = fields
            .split_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|field| field.parse::<u64>().ok())
            .sum();
        Ok(Self {
            resident_mb: testkit::memory_mb(process, "VmRSS")?,
            peak_mb: testkit::memory_mb(process, "VmHWM")?,
            cpu: Duration::from_millis(ticks * 10),
        })
    }

    /// What a process and the processes that it has started use together.
    pub fn of_family(process: u32) -> anyhow::Result<Self> {
        let own = Self::of(process)?;
        let mut children = processor::children(process)?.into_iter();
        children.try_fold(own, |sum, child| Ok(sum + Self::of_family(child)?))
    }
}
