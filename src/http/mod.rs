//! HTTP: health, readiness and metrics.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::json;
use tracing::error;

use crate::{
    observe::{
        health::{Health, PartState},
        metrics::Metrics,
        telemetry::chain,
    },
    store::Store,
};

/// How long a page waits for Postgres. Whoever asks gives up after a few seconds, and
/// then learns nothing.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the pages show.
#[derive(Clone)]
#[allow(missing_docs)] // the parts they ask
pub struct Pages {
    pub store: Store,
    pub health: Health,
    pub metrics: Arc<Metrics>,
}

impl Pages {
    /// All routes.
    pub fn router(self) -> Router {
        Router::new()
            .route("/health", get(health))
            .route("/ready", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self)
    }

    async fn parts(&self) -> Vec<PartState> {
        let answer = match tokio::time::timeout(PATIENCE, self.store.ping()).await {
            Ok(answer) => answer.map_err(|e| chain(&e)),
            Err(_) => Err(format!("no answer within {PATIENCE:?}")),
        };
        let mut parts = vec![PartState {
            name: "postgres".into(),
            up: answer.is_ok(),
            detail: answer.map_or_else(|e| e, |()| "answers".into()),
        }];
        parts.extend(self.health.parts());
        for wait in self.store.waits() {
            if let Some(part) = parts.iter_mut().find(|part| *part.name == *wait.part) {
                part.up = false;
                part.detail = wait.to_string();
            }
        }
        parts
    }
}

/// Always 200: the process lives if it answers. The parts are for people.
async fn health(State(pages): State<Pages>) -> Response {
    let parts = pages.parts().await;
    let degraded = parts.iter().any(|p| !p.up);
    Json(json!({
        "status": if degraded { "degraded" } else { "ok" },
        "version": env!("CARGO_PKG_VERSION"),
        "parts": describe(&parts),
    }))
    .into_response()
}

/// 200 when every part works; else 503 with the names of those that do not.
async fn ready(State(pages): State<Pages>) -> Response {
    let parts = pages.parts().await;
    let down: Vec<&str> = parts
        .iter()
        .filter(|p| !p.up)
        .map(|p| p.name.as_str())
        .collect();
    let status = if down.is_empty() {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let body = json!({
        "ready": down.is_empty(),
        "down": down,
        "parts": describe(&parts),
    });
    (status, Json(body)).into_response()
}

async fn metrics(State(pages): State<Pages>) -> Response {
    let parts: Vec<(String, bool)> = pages
        .parts()
        .await
        .into_iter()
        .map(|p| (p.name, p.up))
        .collect();
    match pages.metrics.render(&parts, pages.store.pool_usage()) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(e) => {
            error!(error = %e, "metrics could not be rendered");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

fn describe(parts: &[PartState]) -> serde_json::Value {
    parts
        .iter()
        .map(|p| (p.name.clone(), json!({ "up": p.up, "detail": p.detail })))
        .collect::<serde_json::Map<_, _>>()
        .into()
}
