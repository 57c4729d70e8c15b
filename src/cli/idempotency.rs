//! `idempotency`: a producer's keys, computed, looked up and cleared.

use anyhow::{Context, bail};
use clap::{Args, Subcommand};

use super::actor;
use crate::{
    config::Settings,
    domain::idempotency,
    store::{
        Store,
        idempotency::{Key, Remembered},
    },
};

#[derive(Debug, Subcommand)]
pub(super) enum Idempotency {
    /// Print the deterministic key of an operation.
    ///
    /// It names the operation. A key on a RetryMessage has to name one failure: put what changes from failure to
    /// failure, such as x-retry-attempt-id, into --parameters.
    Key(Operation),
    /// Print what is remembered under a key, straight from the database; exit 1 if nothing is.
    Show(Name),
    /// Forget a key, so that the next failure that bears it is applied; exit 1 if there is none.
    ///
    /// Works straight at the database. The history of the task that the key was applied to tells who did it.
    Clear(Name),
}

#[derive(Debug, Args)]
pub(super) struct Operation {
    /// What was attempted.
    #[arg(long)]
    operation: String,
    /// The tenant it was attempted for.
    #[arg(long, default_value = "")]
    tenant_id: String,
    /// The correlation id it was attempted under.
    #[arg(long, default_value = "")]
    correlation_id: String,
    /// Further parameters, as a JSON object; their order does not matter.
    #[arg(long, default_value = "{}", value_name = "JSON")]
    parameters: String,
}

#[derive(Debug, Args)]
pub(super) struct Name {
    /// The key, as the producer sent it.
    key: String,
    /// The original queue of the failure that bore it.
    #[arg(long)]
    queue: String,
    /// The tenant of that failure, if it had one.
    #[arg(long)]
    tenant_id: Option<String>,
}

impl Idempotency {
    pub(super) async fn run(self, settings: &Settings) -> anyhow::Result<()> {
        let open = || Store::open(settings, "command-line");
        match self {
            Self::Key(of) => {
                let parameters = serde_json::from_str(&of.parameters)
                    .context("--parameters must be a JSON object")?;
                let (tenant, correlation) = (&of.tenant_id, &of.correlation_id);
                let key = idempotency::key(&of.operation, tenant, correlation, &parameters);
                println!("{key}");
            }
            Self::Show(name) => match open()?.show_key(&name.key()).await? {
                Some(remembered) => print!("{}", describe(&remembered)),
                None => bail!("nothing is remembered under this key"),
            },
            Self::Clear(name) => match open()?.clear_key(&name.key(), &actor()).await? {
                Some(remembered) => print!("cleared\n{}", describe(&remembered)),
                None => bail!("nothing is remembered under this key"),
            },
        }
        Ok(())
    }
}

impl Name {
    fn key(&self) -> Key {
        Key {
            scope: idempotency::scope(&self.queue, self.tenant_id.as_deref()),
            key: self.key.clone(),
        }
    }
}

fn describe(remembered: &Remembered) -> String {
    let digest: String = remembered
        .applied
        .digest
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let task = match &remembered.task {
        Some((message_id, status)) => format!("{message_id} ({status})"),
        None => "removed since".to_owned(),
    };
    format!(
        "applied to   {task}\nretry count  {}\npayload      sha256 {digest}\nuntil        {}\n",
        remembered.applied.retry_count,
        remembered.expires_at.to_rfc3339(),
    )
}
