//! Idempotency keys on the command line: they are computed, shown and cleared.

use retry_scheduler::wire::proto::RetryMessage;

use crate::{
    commands::{run, text},
    support::{Bed, message},
};

/// Operation, tenant id, correlation id, parameters, and the key that
/// `hashlib.sha256(str(sorted(fields.items())).encode()).hexdigest()` gives for them in
/// Python.
const VECTORS: [(&str, &str, &str, &str, &str); 3] = [
    (
        "kill_switch_update",
        "tenant-123",
        "corr-456",
        r#"{"switch_name": "all_execution"}"#,
        "d5923fa44a7b8d95a2a6ce83a85292c5e7a3243498ee9c86a0294ffcef01bb76",
    ),
    (
        "op",
        "",
        "",
        "{}",
        "3b012eef28bc7c3c323573865e85f68d3a9eaec3b4fd24c4ab39033e052ae142",
    ),
    (
        "store",
        "t",
        "c",
        r#"{"a": 1, "b": [true, null, "x"], "c": {"d": "é", "e": "it's"}}"#,
        "bcf7d7bb1c9b2a4d35f532a193fb20e9a3e476f77be0b572c79939d6fd9f7117",
    ),
];

/// Python's key for the parameters `b = 2` and `a = 1`, when they were put into the
/// dictionary in this order.
const OUT_OF_ORDER: &str = "0c404780a90f77a5636322f18173c6f5d4e416bbfa6d2523e17c2bebfd500074";
/// Python's key for the same parameters, when `a` was put into the dictionary before `b`.
const IN_ORDER: &str = "2ccf1bb9e8b0a3b1f5dc1e0227d44f14774c98a413b2f2c0e2b6a25aa36dca7f";

async fn key(bed: &Bed, operation: &str, tenant: &str, correlation: &str, json: &str) -> String {
    let arguments = [
        "idempotency",
        "key",
        "--operation",
        operation,
        "--tenant-id",
        tenant,
        "--correlation-id",
        correlation,
        "--parameters",
        json,
    ];
    let output = run(bed, &arguments).await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    text(&output.stdout).trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_computed_key_is_pythons_for_parameters_in_alphabetical_order() {
    let bed = Bed::new().await;
    for (operation, tenant, correlation, json, expected) in VECTORS {
        let printed = key(&bed, operation, tenant, correlation, json).await;
        assert_eq!(printed, expected, "{operation}");
    }
    // Python's key depends on the order of the parameters. Ours does not, and is Python's
    // for alphabetical order.
    let printed = key(&bed, "store", "t", "c", r#"{"b": 2, "a": 1}"#).await;
    assert_eq!(printed, IN_ORDER);
    assert_ne!(printed, OUT_OF_ORDER);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_can_be_shown_and_cleared_and_its_history_tells_who_did_it() {
    let bed = Bed::new().await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let sent = RetryMessage {
        idempotency_key: "invoice-7".into(),
        tenant_id: "acme".into(),
        ..message(&queue, "once")
    };
    bed.client.send(&bed.intake(), &sent).await;
    inbox.next().await;
    let ask = |verb: &'static str| {
        let bed = &bed;
        let queue = &queue;
        async move {
            let mut command = bed.command();
            let of = [verb, "invoice-7", "--queue", queue, "--tenant-id", "acme"];
            command.env("USER", "ann").arg("idempotency").args(of);
            command.output().await.expect("it runs")
        }
    };
    let shown = ask("show").await;
    assert_eq!(shown.status.code(), Some(0), "{}", text(&shown.stderr));
    let shown = text(&shown.stdout);
    assert!(shown.contains(&sent.message_id), "{shown}");
    assert!(shown.contains("retry count  0"), "{shown}");

    let cleared = ask("clear").await;
    assert_eq!(cleared.status.code(), Some(0), "{}", text(&cleared.stderr));
    assert!(text(&cleared.stdout).contains(&sent.message_id));
    for verb in ["show", "clear"] {
        let gone = ask(verb).await;
        assert_eq!(gone.status.code(), Some(1));
        assert_eq!(text(&gone.stderr).lines().count(), 1);
    }
    let told: Vec<(String, String)> = sqlx::query_as(
        "SELECT e.detail, e.actor FROM retry_events e JOIN retry_queue q ON q.id = e.task_id
         WHERE e.event_type = 'idempotency' AND q.message_id = $1::uuid ORDER BY e.id",
    )
    .bind(&sent.message_id)
    .fetch_all(&bed.db)
    .await
    .expect("events");
    let pair = |detail: &str, actor: &str| (detail.to_owned(), actor.to_owned());
    assert_eq!(
        told,
        [
            pair("record", "service"),
            pair("clear", "command line: ann")
        ]
    );

    // The key is free again, so the same failure is taken for the next one.
    bed.client.send(&bed.intake(), &sent).await;
    assert_eq!(inbox.next().await.number("x-retry-count"), Some(2));
    service.stop().await;
}
