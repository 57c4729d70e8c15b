//! Carries faults out, and watches the instances notice them and recover.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context, ensure};
use devstack::Stack;
use futures::future::join_all;
use lapin::options::QueueDeleteOptions;
use testkit::{Proxy, Way, is_ready};
use tokio::{
    sync::{Mutex, RwLock, mpsc, oneshot},
    task::spawn_blocking,
    time::{Instant, sleep, timeout},
};

use crate::{
    ambush::Missed,
    consumer::Deletion,
    disk::Disk,
    excuse::Record,
    fault::Fault,
    instance::{PAST_TIMEOUTS, Slot},
    ledger::Ledger,
    message::{INTAKE, TARGETS},
    post::{PATIENCE, connect},
    rows::Rows,
    setup,
};

/// Within this time an outage must turn `/ready` red.
const NOTICING: Duration = Duration::from_secs(20);

/// Within this time after a fault has ended, the instances must work again.
const RECOVERING: Duration = Duration::from_secs(60);

/// How long a queue is deleted before it is made anew.
const GONE_FOR: Duration = Duration::from_millis(800);

/// How long a trap waits for an instance to run into it.
const TRAPPING: Duration = Duration::from_secs(5);

/// Everything that a fault may be done to.
pub struct Chaos {
    /// The disk that Postgres's data is on, if it may run full. It is the first field, and so is unmounted
    /// before the stack removes its directory.
    pub disk: Option<Disk>,
    pub stack: Arc<Stack>,
    pub slots: Vec<Mutex<Slot>>,
    /// The campaign's own proxy to Postgres, which follows a promoted standby as those of the instances do.
    pub own: Proxy,
    pub addresses: Vec<SocketAddr>,
    pub deletions: Vec<mpsc::Sender<Deletion>>,
    pub gate: Arc<RwLock<()>>,
    pub ledger: Arc<Ledger>,
    pub rows: Arc<Rows>,
}

/// What one fault led to.
pub struct Told {
    /// How long it took until `/ready` was red, for faults that must turn it red.
    pub red: Option<Duration>,
    /// See [`Missed`].
    pub missed: bool,
    /// How long it took from the end of the fault until all instances worked.
    pub recovery: Duration,
}

impl Chaos {
    /// Carries a fault out, and waits until the instances have recovered from it. `whom` chooses the instance
    /// or the queue.
    pub async fn inflict(&self, fault: Fault, whom: usize) -> anyhow::Result<Told> {
        let begun = Instant::now();
        let red = self.disturb(fault, whom).await;
        let missed = red.as_ref().is_err_and(|e| e.is::<Missed>());
        let red = if missed {
            None
        } else {
            red.with_context(|| fault.name())?
        };
        let recovery = self.recovered(fault).await;
        if !fault.is_death() {
            self.ledger.fault(Record {
                fault,
                whom: fault.hits_one().then_some(whom % self.slots.len()),
                begun,
                ended: Instant::now(),
            });
        }
        self.all_alive().await?;
        Ok(Told {
            red,
            missed,
            recovery,
        })
    }

    async fn disturb(&self, fault: Fault, whom: usize) -> anyhow::Result<Option<Duration>> {
        match fault {
            Fault::Kill => return self.kill(whom).await.map(|()| None),
            Fault::Freeze => {
                let slot = self.slot(whom).lock().await;
                slot.freeze()?;
                sleep(PAST_TIMEOUTS).await;
                slot.thaw()?;
            }
            Fault::Leave => {
                let mut slot = self.slot(whom).lock().await;
                slot.leave().await?;
                sleep(Duration::from_millis(300)).await;
                slot.start()?;
            }
            Fault::PgCrash | Fault::PgKill | Fault::PgRestart => {
                let stop = move |s: &Stack| match fault {
                    Fault::PgCrash => s.postgres.stop_immediate(),
                    Fault::PgKill => s.postgres.kill(),
                    _ => s.postgres.stop(),
                };
                let start = |s: &Stack| s.postgres.start_again();
                return self.outage(fault, stop, start).await;
            }
            Fault::PgFreeze => {
                let (pause, resume) = (
                    |s: &Stack| s.postgres.pause(),
                    |s: &Stack| s.postgres.resume(),
                );
                return self.outage(fault, pause, resume).await;
            }
            Fault::PgTerminate => {
                let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                           WHERE application_name LIKE 'torture-%'";
                self.do_to(move |s| s.postgres.psql("postgres", sql).map(drop))
                    .await?;
            }
            Fault::PgPromote => return self.promote(fault).await,
            Fault::PgFullData | Fault::PgFullWal => return self.fill_disk(fault).await,
            Fault::MqRestart | Fault::MqKill => {
                let stop = move |s: &Stack| match fault {
                    Fault::MqKill => s.rabbitmq.kill(),
                    _ => s.rabbitmq.stop(),
                };
                let start = |s: &Stack| s.rabbitmq.start_again();
                return self.outage(fault, stop, start).await;
            }
            Fault::MqFreeze => {
                let (pause, resume) = (
                    |s: &Stack| s.rabbitmq.pause(),
                    |s: &Stack| s.rabbitmq.resume(),
                );
                return self.outage(fault, pause, resume).await;
            }
            Fault::MqClose => {
                self.do_to(|s| s.rabbitmq.close_all_connections("torture"))
                    .await?;
            }
            Fault::MqMemory => {
                let clear = |s: &Stack| s.rabbitmq.clear_memory_alarm();
                return self
                    .alarm(fault, |s| s.rabbitmq.raise_memory_alarm(), clear)
                    .await;
            }
            Fault::MqDisk => {
                let limit = |s: &Stack, to| s.rabbitmq.ctl(&["set_disk_free_limit", to]).map(drop);
                return self
                    .alarm(
                        fault,
                        move |s| limit(s, "1000000000000000"),
                        move |s| limit(s, "50MB"),
                    )
                    .await;
            }
            Fault::MqReject => {
                let pattern = format!("^{}$", TARGETS[whom % TARGETS.len()]);
                let full = r#"{"max-length":0,"overflow":"reject-publish"}"#;
                self.do_to(move |s| {
                    let set = ["set_policy", "full", &pattern, full];
                    s.rabbitmq.ctl(&set).map(drop)
                })
                .await?;
                sleep(Duration::from_secs(1)).await;
                self.do_to(|s| s.rabbitmq.ctl(&["clear_policy", "full"]).map(drop))
                    .await?;
            }
            Fault::TargetGone => self.delete_target(whom).await?,
            Fault::IntakeGone => self.delete_intake().await?,
            Fault::PgCut | Fault::MqCut => return self.partition(fault, whom, Way::Down).await,
            Fault::PgStall | Fault::MqStall => {
                return self.partition(fault, whom, Way::Stalled).await;
            }
            Fault::PgMute | Fault::MqMute => {
                return self.partition(fault, whom, Way::NoAnswers).await;
            }
            Fault::PgHalfClose | Fault::MqHalfClose => {
                let towards_client = (whom / self.slots.len()).is_multiple_of(2);
                let way = Way::HalfClosed { towards_client };
                return self.partition(fault, whom, way).await;
            }
            Fault::PgSlow | Fault::MqSlow => {
                let slot = self.slot(whom).lock().await;
                let proxy = way_of(&slot, fault);
                proxy.set(Way::Slow(Duration::from_millis(100)));
                sleep(Duration::from_secs(3)).await;
                proxy.set(Way::Open);
            }
            Fault::PgLock => self.lock_table().await?,
            Fault::ClockSkew => self.skew_clock(whom).await?,
            Fault::CrashLoop => self.crash_again_and_again(whom).await?,
            Fault::StandbyAway => return self.send_standby_away(fault).await,
            Fault::Unreadable => self.send_unreadable().await?,
            Fault::Oversized => self.send_oversized().await?,
            Fault::Large => self.send_large(whom).await?,
            Fault::PgCommitLost
            | Fault::PgCommitUnsent
            | Fault::MqConfirmLost
            | Fault::MqAckUnsent
            | Fault::MqPublishUnsent => {
                let slot = self.slot(whom).lock().await;
                let trap = fault.trap().context("no trap")?;
                let sprung = way_of(&slot, fault).set_trap(trap);
                ensure!(sprung.within(TRAPPING).await, Missed);
            }
            Fault::DieBeforeIntakeCommit
            | Fault::DieAfterIntakeCommit
            | Fault::DieBeforeAck
            | Fault::DieAfterAck
            | Fault::DieBeforePublish
            | Fault::DieAfterPublish
            | Fault::DieBeforeConfirm
            | Fault::DieAfterConfirm
            | Fault::DieBeforeSettleCommit
            | Fault::DieAfterSettleCommit => self.die(fault, whom).await?,
        }
        Ok(None)
    }

    pub fn slot(&self, whom: usize) -> &Mutex<Slot> {
        &self.slots[whom % self.slots.len()]
    }

    /// Kills and restarts an instance, if possible one that no other fault is being done to.
    pub async fn kill(&self, whom: usize) -> anyhow::Result<()> {
        let free = (whom..whom + self.slots.len())
            .find_map(|whom| Some((whom, self.slot(whom).try_lock().ok()?)));
        let (whom, mut slot) = match free {
            Some(free) => free,
            None => (whom, self.slot(whom).lock().await),
        };
        slot.kill().await?;
        self.died(Fault::Kill, whom);
        slot.start()
    }

    pub async fn do_to<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Stack) -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<T> {
        let stack = self.stack.clone();
        spawn_blocking(move || act(&stack)).await?
    }

    /// Begins an outage, waits until all instances have noticed, and ends it.
    pub async fn outage(
        &self,
        fault: Fault,
        begin: impl FnOnce(&Stack) -> anyhow::Result<()> + Send + 'static,
        end: impl FnOnce(&Stack) -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<Option<Duration>> {
        self.do_to(begin).await?;
        let red = self.noticed(fault, &self.addresses).await;
        self.do_to(end).await?;
        Ok(Some(red))
    }

    /// Raises an alarm until one instance has noticed. RabbitMQ tells only connections that publish, so not all
    /// need to.
    async fn alarm(
        &self,
        fault: Fault,
        raise: impl FnOnce(&Stack) -> anyhow::Result<()> + Send + 'static,
        clear: impl FnOnce(&Stack) -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<Option<Duration>> {
        self.do_to(raise).await?;
        let red = self.met(fault).await;
        self.do_to(clear).await?;
        red.map(Some)
    }

    /// Waits until any instance is red, for faults that only an instance with work to do can notice.
    pub async fn met(&self, fault: Fault) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        let one = self.addresses.iter().map(|address| seen(*address, false));
        let one = futures::future::select_all(one.map(Box::pin));
        if timeout(NOTICING, one).await.is_err() {
            ensure!(!self.ledger.under_way().is_empty(), Missed);
            self.ledger
                .unexpected(format!("/ready stayed green through {}", fault.name()));
        }
        Ok(begun.elapsed())
    }

    /// Cuts one instance off from one service until it has noticed.
    async fn partition(
        &self,
        fault: Fault,
        whom: usize,
        way: Way,
    ) -> anyhow::Result<Option<Duration>> {
        let slot = self.slot(whom).lock().await;
        let proxy = way_of(&slot, fault);
        proxy.set(way);
        let red = self.noticed(fault, &[slot.address()]).await;
        proxy.set(Way::Open);
        Ok(Some(red))
    }

    /// Deletes a target queue while the instances are frozen: RabbitMQ confirms messages that reach a queue in
    /// the moment of its deletion, and those would count as lost.
    async fn delete_target(&self, whom: usize) -> anyhow::Result<()> {
        let (gone, is_gone) = oneshot::channel();
        let (back, is_back) = oneshot::channel();
        let deletion = Deletion {
            gone_for: GONE_FOR,
            gone,
            back,
        };
        let slots = join_all(self.slots.iter().map(Mutex::lock)).await;
        slots.iter().try_for_each(|slot| slot.freeze())?;
        let asked = self.deletions[whom % self.deletions.len()].send(deletion);
        let deleted = match asked.await {
            Ok(()) => is_gone.await.is_ok(),
            Err(_) => false,
        };
        slots.iter().try_for_each(|slot| slot.thaw())?;
        drop(slots);
        ensure!(deleted, "the queue was never empty");
        Ok(is_back.await?)
    }

    /// Deletes the intake queue and makes it anew, once it holds no message, unacknowledged ones included: those
    /// would be lost, and not by the service.
    async fn delete_intake(&self) -> anyhow::Result<()> {
        let _shut = self.gate.write().await;
        let deadline = Instant::now() + RECOVERING;
        while !self.do_to(|s| setup::is_empty(s, INTAKE)).await? {
            ensure!(Instant::now() < deadline, "the intake queue is never empty");
        }
        let url = self.stack.rabbitmq.url();
        let renew = async {
            let connection = connect(&url).await?;
            let channel = connection.create_channel().await?;
            let options = QueueDeleteOptions::default();
            channel.queue_delete(INTAKE.into(), options).await?;
            // If it is made anew at once, RabbitMQ does not tell the consumers that it was gone, and delivers
            // nothing to them any more.
            sleep(GONE_FOR).await;
            setup::declare(&channel, INTAKE).await?;
            connection.close(200, "made anew".into()).await?;
            anyhow::Ok(())
        };
        // An instance would make it anew, too, and of another type.
        let slots = join_all(self.slots.iter().map(Mutex::lock)).await;
        slots.iter().try_for_each(|slot| slot.freeze())?;
        let renewed = timeout(PATIENCE, renew).await;
        slots.iter().try_for_each(|slot| slot.thaw())?;
        renewed?
    }

    /// Waits until each of these instances has been red, and returns how long that took.
    pub async fn noticed(&self, fault: Fault, who: &[SocketAddr]) -> Duration {
        let begun = Instant::now();
        let all = join_all(who.iter().map(|address| seen(*address, false)));
        if timeout(NOTICING, all).await.is_err() {
            self.ledger
                .unexpected(format!("/ready stayed green through {}", fault.name()));
        }
        begun.elapsed()
    }

    /// Waits until each instance is green again and messages come back.
    async fn recovered(&self, fault: Fault) -> Duration {
        let begun = Instant::now();
        let before = self.ledger.arrivals();
        let all = async {
            join_all(self.addresses.iter().map(|address| seen(*address, true))).await;
            while self.ledger.arrivals() == before && !self.ledger.under_way().is_empty() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        if timeout(RECOVERING, all).await.is_err() {
            self.ledger
                .unexpected(format!("the service did not recover from {}", fault.name()));
        }
        begun.elapsed()
    }

    async fn all_alive(&self) -> anyhow::Result<()> {
        for slot in &self.slots {
            let mut slot = slot.lock().await;
            if let Err(e) = slot.ensure_alive() {
                self.ledger.unexpected(e.to_string());
                slot.start()?;
            }
        }
        Ok(())
    }
}

/// The proxy that a fault in one instance's connections is set on.
fn way_of(slot: &Slot, fault: Fault) -> &Proxy {
    match fault {
        Fault::PgCut
        | Fault::PgStall
        | Fault::PgMute
        | Fault::PgSlow
        | Fault::PgHalfClose
        | Fault::PgCommitLost
        | Fault::PgCommitUnsent => &slot.postgres,
        _ => &slot.rabbitmq,
    }
}

/// Waits until `/ready` is as wanted.
async fn seen(address: SocketAddr, green: bool) {
    while is_ready(address).await != green {
        sleep(Duration::from_millis(50)).await;
    }
}
