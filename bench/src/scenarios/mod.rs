//! The scenarios, one in each file.

mod backlog;
mod burst;
mod drift;
mod footprint;
mod growth;
mod instances;
mod requirements;
mod steady;
mod throughput;
pub mod versus;

use clap::ValueEnum;

use crate::{field::Field, finding::Finding};

/// The scenarios, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// The least it must do: 50 a second sustained, 200 in a burst, and never 5 s late
    Requirements,
    /// Messages a second at 1 KiB, against relay and TTL/DLX
    Throughput,
    /// The same at 64 B, 16 KiB and 256 KiB (in the full form)
    Sizes,
    /// The same to 10 and to 1,000 queues (in the full form)
    Queues,
    /// 64 B to 256 KiB with Postgres on a core of its own (in the full form)
    Apart,
    /// How late messages are at 500 a second, and at 20 to 2,000 with a due moment for each message
    Drift,
    /// Many messages due at one instant, and messages of another queue meanwhile
    Burst,
    /// Rate and lateness with millions of rows that wait for tomorrow
    Backlog,
    /// 1, 2 and 4 instances on one database
    Instances,
    /// Time to start; memory and processor time, idle and at full rate
    Footprint,
    /// The rate in the first and the last minute of millions of messages (in the full form)
    Growth,
}

impl Scenario {
    /// The scenarios that are named, or all that belong to the form.
    pub fn chosen(named: &[Self], full: bool) -> Vec<Self> {
        let all = Self::value_variants().iter().copied();
        if !named.is_empty() {
            return all.filter(|scenario| named.contains(scenario)).collect();
        }
        all.filter(|scenario| full || scenario.is_quick()).collect()
    }

    fn is_quick(self) -> bool {
        !matches!(
            self,
            Self::Sizes | Self::Queues | Self::Apart | Self::Growth
        )
    }

    pub fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or(String::new(), |value| value.get_name().to_owned())
    }

    pub async fn run(self, field: &mut Field) -> anyhow::Result<Vec<Finding>> {
        match self {
            Self::Requirements => requirements::run(field).await,
            Self::Throughput => throughput::run(field).await,
            Self::Sizes => throughput::sizes(field).await,
            Self::Queues => throughput::queues(field).await,
            Self::Apart => throughput::apart(field).await,
            Self::Drift => drift::run(field).await,
            Self::Burst => burst::run(field).await,
            Self::Backlog => backlog::run(field).await,
            Self::Instances => instances::run(field).await,
            Self::Footprint => footprint::run(field).await,
            Self::Growth => growth::run(field).await,
        }
    }
}
