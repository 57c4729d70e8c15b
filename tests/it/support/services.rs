//! The Postgres and RabbitMQ that tests use: one pair for all tests, one to break, and one to examine.

use std::sync::{LazyLock, OnceLock};

use devstack::Stack;
use tokio::sync::{Mutex, MutexGuard};

/// The pair that all tests share, and that no test may break.
pub async fn shared() -> &'static Stack {
    tokio::task::spawn_blocking(devstack::shared)
        .await
        .expect("the shared services start")
}

/// A pair that one test at a time may stop, freeze, fill or kill.
pub type Breakable = MutexGuard<'static, Stack>;

/// Waits until no other test has the breakable pair, and takes it. The last test may have
/// panicked half-way, so both servers are first brought back to working order.
pub async fn breakable() -> Breakable {
    static PAIR: LazyLock<Mutex<Stack>> = LazyLock::new(|| {
        Mutex::new(Stack::start_temporary("breakable").expect("the breakable services start"))
    });
    tokio::task::spawn_blocking(|| {
        let stack = PAIR.blocking_lock();
        let _ = stack.postgres.resume();
        let _ = stack.rabbitmq.resume();
        if stack.postgres.psql("postgres", "SELECT 1").is_err() {
            let _ = stack.postgres.kill();
            stack.postgres.start_again().expect("Postgres starts again");
        }
        let alone = stack.postgres.wait_for_standby(None);
        alone.expect("no commit waits for a standby");
        if !devstack::speaks_amqp(stack.rabbitmq.port()) {
            let _ = stack.rabbitmq.kill();
            stack.rabbitmq.start_again().expect("RabbitMQ starts again");
        }
        stack
            .rabbitmq
            .clear_memory_alarm()
            .expect("no alarm is left");
        stack
    })
    .await
    .expect("the breakable services are there")
}

/// The pair that `doctor` is tried on: RabbitMQ has its management plugin, and Postgres loses
/// nothing when the machine crashes.
pub async fn examined() -> &'static Stack {
    static PAIR: OnceLock<Stack> = OnceLock::new();
    let start = || {
        PAIR.get_or_init(|| Stack {
            postgres: devstack::Postgres::start_temporary_durable("examined").expect("Postgres"),
            rabbitmq: devstack::RabbitMq::start_temporary_with_management("examined")
                .expect("RabbitMQ"),
        })
    };
    tokio::task::spawn_blocking(start)
        .await
        .expect("the examined services start")
}
