//! Three RabbitMQ nodes, one of which is killed.

use std::sync::Arc;

use anyhow::ensure;
use devstack::{Postgres, RabbitMq, Stack};

/// A Postgres, and three nodes of RabbitMQ on which every queue is a quorum queue: a message is confirmed when two of
/// them have it.
pub struct Cluster {
    // The first field, so that these nodes are stopped before the one whose epmd they use.
    others: Vec<RabbitMq>,
    pub stack: Arc<Stack>,
}

impl Cluster {
    pub fn start() -> anyhow::Result<Self> {
        let stack = Stack {
            postgres: Postgres::start_temporary("cluster")?,
            rabbitmq: RabbitMq::start_temporary("cluster")?,
        };
        let first = &stack.rabbitmq;
        let others = vec![
            first.start_member("cluster")?,
            first.start_member("cluster")?,
        ];
        first.ctl(&[
            "update_vhost_metadata",
            "/",
            "--default-queue-type",
            "quorum",
        ])?;
        Ok(Self {
            others,
            stack: Arc::new(stack),
        })
    }

    pub fn nodes(&self) -> Vec<&RabbitMq> {
        [&self.stack.rabbitmq]
            .into_iter()
            .chain(&self.others)
            .collect()
    }

    /// Fails if there is a queue that is not on all three nodes.
    pub fn ensure_quorum(&self) -> anyhow::Result<()> {
        let list = ["list_queues", "--silent", "name", "type", "members"];
        let queues = self.stack.rabbitmq.ctl(&list)?;
        for queue in queues.lines() {
            let columns: Vec<&str> = queue.split('\t').collect();
            let [_, kind, members] = columns[..] else {
                anyhow::bail!("what is {queue:?}?");
            };
            ensure!(kind == "quorum", "a queue that is not replicated: {queue}");
            ensure!(
                members.split(',').count() == 3,
                "a queue that is not on three nodes: {queue}"
            );
        }
        Ok(())
    }
}
