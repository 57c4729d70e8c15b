//! RabbitMQ's management API: the arguments, policies and bindings that AMQP does not tell.
//!
//! It is asked only to find out whether a set-up can lose messages. The service works without it.

use std::{collections::HashMap, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use chrono::{DateTime, Utc};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{
    Request, StatusCode,
    body::Bytes,
    header::{AUTHORIZATION, DATE, HOST},
};
use hyper_util::rt::TokioIo;
use lapin::uri::{AMQPScheme, AMQPUri};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::Value;
use url::Url;

use super::dial::dial;
use crate::config::Settings;

/// The ports of the plugin as it is installed.
const PORT: u16 = 15672;
const TLS_PORT: u16 = 15671;

/// The most bytes of one answer. A queue with ten thousand bindings answers with about 2 MB.
const LONGEST_ANSWER: usize = 16 * 1024 * 1024;

/// The API did not tell.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ApiError {
    /// Nobody answers there, or not in time.
    #[error("{0}")]
    Unreachable(String),
    /// The user may not ask this.
    #[error("it refuses this user ({0})")]
    Refused(StatusCode),
    /// The answer is not one of RabbitMQ's.
    #[error("its answer cannot be used: {0}")]
    Unreadable(String),
}

/// How to ask the API.
#[derive(Clone)]
pub struct Management {
    base: Url,
    vhost: String,
    authorization: SecretString,
    timeout: Duration,
}

/// What the API says of the cluster.
#[derive(Clone, Debug, Deserialize)]
pub struct Overview {
    /// The name that the broker's greeting has, too.
    #[serde(default)]
    pub cluster_name: String,
    /// The broker's clock less ours; the answer tells whole seconds.
    #[serde(skip)]
    pub clock_ahead: Option<chrono::TimeDelta>,
}

/// What the API says of a queue.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // the names are RabbitMQ's
pub struct QueueFacts {
    pub name: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub durable: bool,
    pub auto_delete: bool,
    pub exclusive: bool,
    #[serde(deserialize_with = "table")]
    pub arguments: HashMap<String, Value>,
    /// The policies in effect, merged; `None` until the broker has gathered its statistics, a
    /// few seconds after the queue was declared.
    #[serde(deserialize_with = "some_table")]
    pub effective_policy_definition: Option<HashMap<String, Value>>,
    pub policy: Option<String>,
    pub messages: Option<u64>,
    pub consumers: Option<u64>,
    /// The nodes that have a copy of a quorum queue.
    pub members: Vec<String>,
    /// The nodes that mirror a classic queue.
    #[serde(deserialize_with = "nodes")]
    pub slave_nodes: Vec<String>,
    /// The delivery limit in force, which RabbitMQ tells from 4.0 on for some queues.
    pub delivery_limit: Option<Value>,
}

/// What the API says of an exchange.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // the names are RabbitMQ's
pub struct ExchangeFacts {
    pub name: String,
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(deserialize_with = "table")]
    pub arguments: HashMap<String, Value>,
    #[serde(deserialize_with = "some_table")]
    pub effective_policy_definition: Option<HashMap<String, Value>>,
}

/// One binding.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // the names are RabbitMQ's
pub struct Binding {
    pub source: String,
    pub destination: String,
    pub destination_type: String,
    pub routing_key: String,
    #[serde(deserialize_with = "table")]
    pub arguments: HashMap<String, Value>,
}

/// What the API says of a node.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // the names are RabbitMQ's
pub struct Node {
    pub name: String,
    pub running: bool,
    pub mem_alarm: bool,
    pub disk_free_alarm: bool,
}

impl Management {
    /// Takes the address from RABBITMQ_MANAGEMENT_URL, or from RABBITMQ_URL and the plugin's
    /// usual port.
    pub fn new(settings: &Settings, timeout: Duration) -> anyhow::Result<Self> {
        let amqp: AMQPUri = settings
            .rabbitmq_url
            .expose_secret()
            .parse()
            .map_err(|e| anyhow::anyhow!("RABBITMQ_URL: {e}"))?;
        let base = match &settings.rabbitmq_management_url {
            Some(url) => url.clone(),
            None => usual_address(&amqp)?,
        };
        let login = &amqp.authority.userinfo;
        let login = STANDARD.encode(format!("{}:{}", login.username, login.password));
        Ok(Self {
            base,
            vhost: amqp.vhost,
            authorization: format!("Basic {login}").into(),
            timeout,
        })
    }

    /// The address.
    pub fn address(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// What the API says of the cluster.
    pub async fn overview(&self) -> Result<Overview, ApiError> {
        let (found, date): (Option<Overview>, _) = self.get(&["overview"]).await?;
        let mut overview = found.ok_or_else(|| not_there("/api/overview"))?;
        overview.clock_ahead = date.map(|theirs| theirs - Utc::now());
        Ok(overview)
    }

    /// The nodes of the cluster. The user needs the tag `monitoring`.
    pub async fn nodes(&self) -> Result<Vec<Node>, ApiError> {
        let (nodes, _) = self.get(&["nodes"]).await?;
        nodes.ok_or_else(|| not_there("/api/nodes"))
    }

    /// A queue of our vhost, if there is one of that name.
    pub async fn queue(&self, name: &str) -> Result<Option<QueueFacts>, ApiError> {
        let (queue, _) = self.get(&["queues", &self.vhost, name]).await?;
        Ok(queue)
    }

    /// The bindings that lead to a queue, without that of the default exchange.
    pub async fn bindings_to(&self, queue: &str) -> Result<Vec<Binding>, ApiError> {
        let path = ["queues", &self.vhost, queue, "bindings"];
        let (bindings, _) = self.get::<Vec<Binding>>(&path).await?;
        let mut bindings = bindings.unwrap_or_default();
        bindings.retain(|binding| !binding.source.is_empty());
        Ok(bindings)
    }

    /// An exchange of our vhost, if there is one of that name.
    pub async fn exchange(&self, name: &str) -> Result<Option<ExchangeFacts>, ApiError> {
        let (exchange, _) = self.get(&["exchanges", &self.vhost, name]).await?;
        Ok(exchange)
    }

    /// The bindings that lead from an exchange.
    pub async fn bindings_from(&self, exchange: &str) -> Result<Vec<Binding>, ApiError> {
        let path = ["exchanges", &self.vhost, exchange, "bindings", "source"];
        let (bindings, _) = self.get(&path).await?;
        Ok(bindings.unwrap_or_default())
    }

    /// Asks for what has this path; `None` if there is no such thing. Also gives the time of
    /// the answer by the broker's clock.
    async fn get<T: DeserializeOwned>(
        &self,
        path: &[&str],
    ) -> Result<(Option<T>, Option<DateTime<Utc>>), ApiError> {
        match tokio::time::timeout(self.timeout, self.ask(path)).await {
            Ok(answer) => answer,
            Err(_) => Err(ApiError::Unreachable(format!(
                "no answer within {:?}",
                self.timeout
            ))),
        }
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        path: &[&str],
    ) -> Result<(Option<T>, Option<DateTime<Utc>>), ApiError> {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().push("api").extend(path);
        }
        let host = url.host_str().unwrap_or_default();
        let port = url.port_or_known_default().unwrap_or(PORT);
        let unreachable = |e: &dyn std::fmt::Display| ApiError::Unreachable(e.to_string());
        let stream = dial(host, port, url.scheme() == "https")
            .await
            .map_err(|e| unreachable(&e))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| unreachable(&e))?;
        // It ends when the sender is dropped, at the end of this function or at the deadline.
        tokio::spawn(connection);
        let request = Request::get(url.path())
            .header(HOST, format!("{host}:{port}"))
            .header(AUTHORIZATION, self.authorization.expose_secret())
            .body(Empty::<Bytes>::new())
            .map_err(|e| unreachable(&e))?;
        let answer = sender
            .send_request(request)
            .await
            .map_err(|e| unreachable(&e))?;
        let date = answer.headers().get(DATE).and_then(|date| {
            let date = DateTime::parse_from_rfc2822(date.to_str().ok()?).ok()?;
            Some(date.to_utc())
        });
        match answer.status() {
            StatusCode::OK => {}
            StatusCode::NOT_FOUND => return Ok((None, date)),
            status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
                return Err(ApiError::Refused(status));
            }
            status => return Err(ApiError::Unreadable(status.to_string())),
        }
        let body = Limited::new(answer.into_body(), LONGEST_ANSWER)
            .collect()
            .await
            .map_err(|e| ApiError::Unreadable(e.to_string()))?;
        let body = serde_json::from_slice(&body.to_bytes())
            .map_err(|e| ApiError::Unreadable(e.to_string()))?;
        Ok((Some(body), date))
    }
}

fn not_there(path: &str) -> ApiError {
    ApiError::Unreadable(format!("there is no {path}"))
}

fn usual_address(amqp: &AMQPUri) -> anyhow::Result<Url> {
    let (scheme, port) = match amqp.scheme {
        AMQPScheme::AMQP => ("http", PORT),
        AMQPScheme::AMQPS => ("https", TLS_PORT),
    };
    let host = &amqp.authority.host;
    Ok(format!("{scheme}://{host}:{port}").parse()?)
}

/// RabbitMQ writes an empty table as `[]` at times.
fn table<'de, D: Deserializer<'de>>(from: D) -> Result<HashMap<String, Value>, D::Error> {
    Ok(some_table(from)?.unwrap_or_default())
}

fn some_table<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<HashMap<String, Value>>, D::Error> {
    Ok(match Value::deserialize(from)? {
        Value::Object(fields) => Some(fields.into_iter().collect()),
        Value::Array(empty) if empty.is_empty() => Some(HashMap::new()),
        _ => None,
    })
}

/// A list of nodes; a queue that has none may say `null` or an empty text.
fn nodes<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    Ok(match Value::deserialize(from)? {
        Value::Array(nodes) => nodes
            .iter()
            .filter_map(|node| node.as_str().map(str::to_owned))
            .collect(),
        _ => Vec::new(),
    })
}
