//! What is compared: the floors, the peers, and retry-scheduler in one, two and four instances.

use bench::{
    field::{DELAY, Field, Lane, RELAY, Way},
    floor::{Relay, into_first_target},
    producer::Shape,
    scheduler::Scheduler,
    usage::Usage,
};
use clap::{ValueEnum, builder::PossibleValue};
use futures::future::try_join_all;
use lapin::types::FieldTable;

use crate::process::{Kind, Process};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    DelayQueue,
    Relay,
    Peer(Kind),
    /// retry-scheduler, in so many instances.
    Ours(usize),
}

/// What the others are compared with.
pub const OURS: Contender = Contender::Ours(1);

/// All contenders, in the order of the table.
const ALL: [Contender; 9] = [
    Contender::DelayQueue,
    Contender::Relay,
    Contender::Peer(Kind::Pgmq),
    OURS,
    Contender::Peer(Kind::PgBoss),
    Contender::Peer(Kind::Apalis),
    Contender::Peer(Kind::Awa),
    Contender::Ours(2),
    Contender::Ours(4),
];

impl ValueEnum for Contender {
    fn value_variants<'a>() -> &'a [Self] {
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::DelayQueue => Some("ttl-dlx".into()),
            Self::Relay => Some("relay".into()),
            Self::Peer(kind) => kind.to_possible_value(),
            Self::Ours(1) => Some("retry-scheduler".into()),
            Self::Ours(count) => Some(PossibleValue::new(match count {
                2 => "x2",
                _ => "x4",
            })),
        }
    }
}

impl Contender {
    /// The contenders that are named and retry-scheduler, or all of them.
    pub fn chosen(named: &[Self]) -> Vec<Self> {
        let mut chosen = ALL.to_vec();
        chosen.retain(|one| named.is_empty() || *one == OURS || named.contains(one));
        chosen
    }

    /// The name in the table.
    pub fn title(self) -> String {
        match self {
            Self::DelayQueue => "TTL/DLX in RabbitMQ".into(),
            Self::Relay => "relay, no database".into(),
            Self::Peer(Kind::Pgmq) => "pgmq 0.33 (no history, no identity, no policy)".into(),
            Self::Peer(Kind::PgBoss) => "pg-boss 12.35".into(),
            Self::Peer(Kind::Apalis) => "apalis-postgres 1.0".into(),
            Self::Peer(Kind::Awa) => "awa 0.6.9".into(),
            Self::Ours(1) => "retry-scheduler".into(),
            Self::Ours(count) => format!("retry-scheduler x{count}"),
        }
    }

    /// Whether a message can name a moment at which it is due.
    pub fn has_due_moments(self) -> bool {
        !matches!(self, Self::DelayQueue | Self::Relay)
    }

    /// Creates the queues that lead to it.
    pub async fn prepare(self, field: &mut Field) -> anyhow::Result<Prepared> {
        let way = match self {
            Self::DelayQueue => {
                field.queue(DELAY, into_first_target()).await?;
                Way::delay_queue()
            }
            Self::Relay => {
                field.queue(RELAY, FieldTable::default()).await?;
                Way::relay()
            }
            Self::Peer(kind) => {
                field.queue(&kind.intake(), FieldTable::default()).await?;
                Way {
                    entry: kind.intake(),
                    shape: Shape::RetryMessage,
                    lane: None,
                }
            }
            Self::Ours(count) => Way::through(&field.lane(&format!("peers_{count}")).await?),
        };
        Ok(Prepared {
            contender: self,
            way,
        })
    }
}

/// A contender, and the way that messages take through it.
pub struct Prepared {
    pub contender: Contender,
    pub way: Way,
}

impl Prepared {
    pub async fn start(&self, field: &Field) -> anyhow::Result<Running> {
        let of_lane = |lane: Option<&Lane>, count| {
            let lane = lane.cloned();
            async move {
                let lanes = lane.iter().cycle().take(count);
                try_join_all(lanes.map(|lane| field.scheduler(lane, &[]))).await
            }
        };
        Ok(match self.contender {
            Contender::DelayQueue => Running::Broker,
            Contender::Relay => {
                Running::Relay(Relay::start(&field.setup.rabbitmq_url, &field.channel).await?)
            }
            Contender::Peer(kind) => Running::Peer(Process::start(kind, field).await?),
            Contender::Ours(count) => Running::Ours(of_lane(self.way.lane.as_ref(), count).await?),
        })
    }
}

/// The processes of a contender. They end when this is dropped.
pub enum Running {
    Broker,
    Relay(Relay),
    Peer(Process),
    Ours(Vec<Scheduler>),
}

impl Running {
    /// What its processes use together.
    pub fn usage(&self) -> anyhow::Result<Usage> {
        let processes: Vec<u32> = match self {
            Self::Broker => Vec::new(),
            Self::Relay(relay) => vec![relay.id()],
            Self::Peer(process) => vec![process.id()],
            Self::Ours(schedulers) => schedulers.iter().map(Scheduler::id).collect(),
        };
        let mut processes = processes.into_iter();
        processes.try_fold(Usage::default(), |sum, id| Ok(sum + Usage::of_family(id)?))
    }

    /// Waits until a peer is done with all messages, of which there were so many since its start.
    /// For retry-scheduler [`Field::race`] has waited already.
    pub async fn until_settled(&mut self, count: u32) -> anyhow::Result<()> {
        match self {
            Self::Peer(process) => process.until_settled(count).await,
            _ => Ok(()),
        }
    }

    pub async fn stop(self) -> anyhow::Result<()> {
        if let Self::Ours(schedulers) = self {
            try_join_all(schedulers.into_iter().map(Scheduler::stop)).await?;
        }
        Ok(())
    }
}
