//! All faults, and the plan of a campaign: which faults happen in which order follows from the seed.

use clap::ValueEnum;
use fastrand::Rng;
use retry_scheduler::plant::Point;
use testkit::{
    Fault::{Cut, LoseAnswer},
    Trap,
};

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Fault {
    /// SIGKILL for an instance, which is started again
    Kill,
    /// SIGSTOP for an instance until all its time-outs have passed
    Freeze,
    /// SIGTERM for an instance, which leaves, and joins again
    Leave,
    /// Postgres: `stop -m immediate`
    PgCrash,
    /// Postgres: SIGKILL for all its processes
    PgKill,
    /// Postgres: `stop -m fast`
    PgRestart,
    /// Postgres: SIGSTOP for all its processes
    PgFreeze,
    /// Postgres: all backends terminated
    PgTerminate,
    /// Postgres: SIGKILL, and a synchronous standby promoted in its place
    PgPromote,
    /// Postgres: no room for data until that is noticed
    PgFullData,
    /// Postgres: no room for WAL, at which it panics
    PgFullWal,
    /// RabbitMQ: stopped and started
    MqRestart,
    /// RabbitMQ: SIGKILL
    MqKill,
    /// RabbitMQ: SIGSTOP
    MqFreeze,
    /// RabbitMQ: all connections closed
    MqClose,
    /// RabbitMQ: memory alarm
    MqMemory,
    /// RabbitMQ: disk alarm
    MqDisk,
    /// RabbitMQ: a target queue that rejects publishes
    MqReject,
    /// A target queue deleted, and made anew
    TargetGone,
    /// The intake queue deleted, and made anew
    IntakeGone,
    /// One instance cut off from Postgres
    PgCut,
    /// One instance's connections to Postgres stall
    PgStall,
    /// One instance hears nothing of Postgres
    PgMute,
    /// One instance's way to Postgres is slow
    PgSlow,
    /// One instance's connection cut after a COMMIT, before its answer
    PgCommitLost,
    /// One instance's connection cut before a COMMIT
    PgCommitUnsent,
    /// One instance cut off from RabbitMQ
    MqCut,
    /// One instance's connections to RabbitMQ stall
    MqStall,
    /// One instance hears nothing of RabbitMQ
    MqMute,
    /// One instance's connection cut before a confirm
    MqConfirmLost,
    /// One instance's connection cut before an ack
    MqAckUnsent,
    /// One instance's connection cut before a publish
    MqPublishUnsent,
    /// RabbitMQ's or one instance's end of their connections shut, not the other
    MqHalfClose,
    /// One instance's way to RabbitMQ is slow
    MqSlow,
    /// Postgres's or one instance's end of their connections shut, not the other
    PgHalfClose,
    /// Postgres: the table locked for longer than a statement may take
    PgLock,
    /// An instance leaves, and joins with its clock an hour off until its next start
    ClockSkew,
    /// The only instance killed 25 times while it starts or holds deliveries
    CrashLoop,
    /// Postgres: every COMMIT waits for a synchronous standby that is away
    StandbyAway,
    /// A message with a property that is not UTF-8 in the intake queue
    Unreadable,
    /// A dead letter as large as RabbitMQ takes it, which has to go to review
    Oversized,
    /// 256 MiB of large messages waiting for one instance
    Large,
    /// SIGKILL at a failpoint: failures are stored, not committed
    DieBeforeIntakeCommit,
    /// SIGKILL at a failpoint: failures are committed
    DieAfterIntakeCommit,
    /// SIGKILL at a failpoint: committed failures are not acked
    DieBeforeAck,
    /// SIGKILL at a failpoint: they are acked
    DieAfterAck,
    /// SIGKILL at a failpoint: a claimed message is not published
    DieBeforePublish,
    /// SIGKILL at a failpoint: it is handed over, with the rest of its batch
    DieAfterPublish,
    /// SIGKILL at a failpoint: a batch is published, no confirm is read
    DieBeforeConfirm,
    /// SIGKILL at a failpoint: all confirms are read
    DieAfterConfirm,
    /// SIGKILL at a failpoint: a batch is settled, not committed
    DieBeforeSettleCommit,
    /// SIGKILL at a failpoint: a settled batch is committed
    DieAfterSettleCommit,
}

impl Fault {
    pub fn name(self) -> String {
        let value = self.to_possible_value();
        value.map(|v| v.get_name().to_owned()).unwrap_or_default()
    }

    /// Whether it needs a disk that can be filled.
    pub fn fills_disk(self) -> bool {
        matches!(self, Self::PgFullData | Self::PgFullWal)
    }

    /// The failpoint at which an instance kills itself, for faults that are such a death.
    pub fn point(self) -> Option<Point> {
        Some(match self {
            Self::DieBeforeIntakeCommit => Point::BeforeIntakeCommit,
            Self::DieAfterIntakeCommit => Point::AfterIntakeCommit,
            Self::DieBeforeAck => Point::BeforeAck,
            Self::DieAfterAck => Point::AfterAck,
            Self::DieBeforePublish => Point::BeforePublish,
            Self::DieAfterPublish => Point::AfterPublish,
            Self::DieBeforeConfirm => Point::BeforeConfirm,
            Self::DieAfterConfirm => Point::AfterConfirm,
            Self::DieBeforeSettleCommit => Point::BeforeSettleCommit,
            Self::DieAfterSettleCommit => Point::AfterSettleCommit,
            _ => return None,
        })
    }

    /// What the proxy waits for before it breaks the connection, for faults that need a certain moment. In AMQP
    /// a method is recognised by the number of its class, here 60 (basic), and its own.
    pub fn trap(self) -> Option<Trap> {
        const PUBLISH: [u8; 4] = [0, 60, 0, 40];
        const ACK: [u8; 4] = [0, 60, 0, 80];
        Some(match self {
            Self::PgCommitLost => Trap::on_request(b"COMMIT", LoseAnswer),
            Self::PgCommitUnsent => Trap::on_request(b"COMMIT", Cut),
            Self::MqConfirmLost => Trap::on_answer(&ACK, Cut),
            Self::MqAckUnsent => Trap::on_request(&ACK, Cut),
            Self::MqPublishUnsent => Trap::on_request(&PUBLISH, Cut),
            _ => return None,
        })
    }
}

/// A fault that will happen.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    pub fault: Fault,
    pub whom: usize,
    /// Milliseconds to wait before it.
    pub pause: u64,
}

/// Plans `count` faults: each of `kinds` once in random order, then each again in another order.
pub fn plan(seed: u64, kinds: &[Fault], count: usize) -> Vec<Planned> {
    let mut random = Rng::with_seed(seed);
    let mut plan = Vec::with_capacity(count);
    let mut round: Vec<Fault> = Vec::new();
    while plan.len() < count && !kinds.is_empty() {
        let fault = match round.pop() {
            Some(fault) => fault,
            None => {
                round.extend(kinds);
                random.shuffle(&mut round);
                continue;
            }
        };
        plan.push(Planned {
            fault,
            whom: random.usize(..1 << 16),
            pause: random.u64(100..1000),
        });
    }
    plan
}
