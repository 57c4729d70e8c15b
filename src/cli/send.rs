//! `send`: publishes one RetryMessage, as a dead-letter handler would.

use std::io::Read;

use anyhow::{Context, anyhow, bail};
use clap::{Args, ValueEnum};
use uuid::Uuid;

use crate::{
    broker::{Broker, Outcome},
    config::Settings,
    wire::{self, proto},
};

#[derive(Debug, Args)]
pub(super) struct Send {
    /// The queue the message goes back to.
    #[arg(long)]
    queue: String,
    /// The body of the message; `-` reads standard input.
    #[arg(long)]
    payload: String,
    /// Why it failed.
    #[arg(long, default_value = "sent by hand")]
    error: String,
    /// The type of the error, such as TimeoutError.
    #[arg(long, default_value = "")]
    error_type: String,
    /// The class of the failure; left out, the error text decides.
    #[arg(long, value_enum)]
    error_class: Option<Class>,
    /// What was attempted.
    #[arg(long, default_value = "")]
    operation: String,
    /// The id of the message; a new one is made when it is left out.
    #[arg(long)]
    message_id: Option<String>,
    /// Retries already made.
    #[arg(long, default_value_t = 0)]
    retry_count: i32,
    /// Retries allowed; 0 leaves it to the policy.
    #[arg(long, default_value_t = 0)]
    max_retries: i32,
    /// The earliest moment of the retry, in Unix time in ms; 0 names none.
    #[arg(long, default_value_t = 0, value_name = "MS")]
    next_retry_at_ms: i64,
    /// The pause that a rate-limited failure asks for.
    #[arg(long, value_name = "MS")]
    retry_after_ms: Option<i64>,
    /// When it failed for the first time, in Unix time in ms; 0 means now.
    #[arg(long, default_value_t = 0, value_name = "MS")]
    first_failed_at_ms: i64,
    /// The category, which picks the policy.
    #[arg(long, default_value = "")]
    category: String,
    /// Names this one failure, so that it is applied once.
    #[arg(long, default_value = "")]
    idempotency_key: String,
    /// The tenant, for fairness and search.
    #[arg(long, default_value = "")]
    tenant_id: String,
    /// The correlation id, for search.
    #[arg(long, default_value = "")]
    correlation_id: String,
    /// The trace id, for search.
    #[arg(long, default_value = "")]
    trace_id: String,
    /// Live work goes before backfill when both are due.
    #[arg(long, value_enum, default_value = "live")]
    priority: Priority,
    /// AMQP properties and headers to restore, as proto3 JSON:
    /// {"contentType":"text/plain","headers":{"h":{"text":"v"}}}
    #[arg(long, value_name = "JSON")]
    properties: Option<String>,
    /// Create the target queue (durable) if it does not exist.
    #[arg(long)]
    declare: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Class {
    Final,
    Retryable,
    RateLimited,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Priority {
    Live,
    Backfill,
}

impl Send {
    pub(super) async fn run(self, settings: &Settings) -> anyhow::Result<()> {
        let declare = self.declare;
        let message = self.message()?;
        let broker = Broker::new(settings)?;
        if declare {
            broker.declare(&message.original_queue).await?;
        }
        let review = &settings.manual_review_queue;
        broker.declare_intake(&settings.retry_queue, review).await?;
        let mut publisher = broker.publisher(review).await?;
        let outgoing = wire::request(&message, &settings.retry_queue, Uuid::now_v7())
            .map_err(|e| anyhow!("RETRY_QUEUE: {e}"))?;
        let (outcomes, fault) = publisher.publish(&[outgoing]).await;
        publisher.close().await;
        if let Some(fault) = fault {
            return Err(fault.into());
        }
        match outcomes.first() {
            Some(Outcome::Confirmed) => {
                println!("{} is on {}", message.message_id, settings.retry_queue);
                Ok(())
            }
            other => bail!("RabbitMQ did not take the message: {other:?}"),
        }
    }

    fn message(self) -> anyhow::Result<proto::RetryMessage> {
        let mut payload = self.payload.into_bytes();
        if payload == b"-" {
            payload.clear();
            std::io::stdin()
                .read_to_end(&mut payload)
                .context("reading the payload")?;
        }
        let class = match self.error_class {
            None => proto::ErrorClass::Unspecified,
            Some(Class::Final) => proto::ErrorClass::Final,
            Some(Class::Retryable) => proto::ErrorClass::Retryable,
            Some(Class::RateLimited) => proto::ErrorClass::RateLimited,
        };
        let priority = match self.priority {
            Priority::Live => proto::Priority::Live,
            Priority::Backfill => proto::Priority::Backfill,
        };
        let properties = self
            .properties
            .map(|json| serde_json::from_str(&json))
            .transpose()
            .context("--properties must be a retry.v1.Properties in JSON")?;
        // Every field is named, so that a field added to the contract gets its option.
        Ok(proto::RetryMessage {
            message_id: self
                .message_id
                .unwrap_or_else(|| Uuid::now_v7().to_string()),
            original_payload: payload,
            original_queue: self.queue,
            error_reason: self.error,
            retry_count: self.retry_count,
            max_retries: self.max_retries,
            next_retry_at_ms: self.next_retry_at_ms,
            error_class: class.into(),
            retry_after_ms: self.retry_after_ms,
            category: self.category,
            idempotency_key: self.idempotency_key,
            tenant_id: self.tenant_id,
            correlation_id: self.correlation_id,
            trace_id: self.trace_id,
            properties,
            priority: priority.into(),
            first_failed_at_ms: self.first_failed_at_ms,
            operation: self.operation,
            error_type: self.error_type,
        })
    }
}
