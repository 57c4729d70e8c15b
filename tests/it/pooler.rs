//! PgBouncer between the service and Postgres: it works as installed where statements are
//! kept apart, and is refused where they are not.

use std::collections::HashSet;

use devstack::{PgBouncer, PgBouncerProgram};
use retry_scheduler::wire::proto::RetryMessage;

use crate::support::{Bed, Process, disturb, eventually, message, shared};

const MESSAGES: usize = 300;

/// All clients share one connection to Postgres.
const ONE_SERVER: &str = "default_pool_size = 1";

const REFUSED: &str = "DATABASE_URL leads to a pooler in transaction mode that mixes up";

/// A bed whose instances go through a PgBouncer with these settings. The test's own
/// connections do not.
async fn bed_behind(settings: &[&str]) -> (Bed, PgBouncer) {
    let stack = shared().await;
    let mut bed = Bed::on(stack).await;
    if settings.contains(&ONE_SERVER) {
        // Migrations hold a lock on one server while they run on another.
        bed.migrate().await;
        bed.set("MIGRATE_ON_START", "false");
    }
    let bouncer = disturb(|| PgBouncer::start_temporary(&stack.postgres, settings));
    let direct = url::Url::parse(bed.setting("DATABASE_URL")).expect("a URL");
    let database = direct.path().trim_start_matches('/');
    bed.set("DATABASE_URL", &bouncer.url(database))
        .set("BASE_DELAY_MS", "20")
        .set("INTAKE_BATCH", "20")
        .set("DISPATCH_BATCH", "20");
    (bed, bouncer)
}

/// The settings by which PgBouncer mixes up statements. Before 1.21 it knows no better.
fn mixing_up() -> Vec<&'static str> {
    let mut settings = vec!["pool_mode = transaction"];
    if disturb(|| PgBouncerProgram::find_or_install()?.version()) >= (1, 21) {
        settings.push("max_prepared_statements = 0");
    }
    settings
}

/// Sends messages through so many instances; each has to come back once.
async fn all_come_back_once(settings: &[&str], instances: usize) {
    let (bed, _bouncer) = bed_behind(settings).await;
    let queue = bed.declare("target").await;
    let services: Vec<Process> = (0..instances)
        .map(|_| Process::spawn(bed.command()))
        .collect();
    for service in &services {
        service.until_ready().await;
    }
    let messages: Vec<RetryMessage> = (0..MESSAGES)
        .map(|n| message(&queue, format!("{n}")))
        .collect();
    bed.client.send_all(&bed.intake(), &messages).await;
    let retried = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";
    bed.until_count(retried, MESSAGES as i64).await;
    for service in services {
        service.signal("TERM").await;
        let (status, log) = service.ended().await;
        assert_eq!(status.code(), Some(0), "{log}");
        assert!(!log.contains(REFUSED), "{settings:?}: {log}");
    }
    assert_eq!(bed.client.depth(&queue).await, Some(MESSAGES as u32));
    let ids = bed.client.ids(&queue, MESSAGES).await;
    let ids: HashSet<String> = ids.into_iter().collect();
    assert_eq!(ids.len(), MESSAGES, "{settings:?}: some were sent twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pgbouncer_as_installed_works_in_session_mode() {
    all_come_back_once(&[], 2).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a newer PgBouncer: cargo dev test --pgbouncer 1.24 -- --test it -- --include-ignored pooler"]
async fn a_pgbouncer_that_keeps_statements_apart_works_in_transaction_mode() {
    let transaction = "pool_mode = transaction";
    all_come_back_once(&[transaction], 1).await;
    all_come_back_once(&[transaction, "default_pool_size = 3"], 2).await;
    all_come_back_once(&[transaction, ONE_SERVER], 1).await;
    all_come_back_once(&[transaction, "server_round_robin = 1"], 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_pooler_that_mixes_up_statements_nothing_is_stored_or_sent_until_it_is_replaced() {
    let stack = shared().await;
    let mixing = mixing_up();
    for more in ["", ONE_SERVER, "server_round_robin = 1"] {
        let settings = [mixing.as_slice(), &[more]].concat();
        let (bed, bouncer) = bed_behind(&settings).await;
        let queue = bed.declare("target").await;
        bed.client.declare(&bed.intake()).await;
        let service = Process::spawn(bed.command());
        let messages: Vec<RetryMessage> =
            (0..50).map(|n| message(&queue, format!("{n}"))).collect();
        bed.client.send_all(&bed.intake(), &messages).await;
        eventually(
            &format!("{settings:?} is refused several times"),
            || async { (service.log().matches(REFUSED).count() >= 3).then_some(()) },
        )
        .await;
        let (status, body) = service.get("/ready").await;
        assert_eq!(status, 503, "{settings:?}");
        assert!(body.contains(REFUSED), "{settings:?}: {body}");
        // No table was made, or nothing was written to it.
        let written = "SELECT COALESCE(sum(pg_relation_size(oid)), 0)::bigint FROM pg_class
                       WHERE relname IN ('retry_queue', 'retry_history')";
        assert_eq!(bed.count(written).await, 0, "{settings:?}");
        assert_eq!(bed.client.depth(&bed.intake()).await, Some(50));

        disturb(|| bouncer.start_anew(&stack.postgres, &[]));
        service.until_ready().await;
        let retried = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";
        bed.until_count(retried, 50).await;
        assert_eq!(bed.client.depth(&queue).await, Some(50), "{settings:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_that_turns_bad_while_the_service_runs_is_refused_too() {
    let stack = shared().await;
    let mixing = mixing_up();
    let (bed, bouncer) = bed_behind(&[]).await;
    let queue = bed.declare("target").await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;
    disturb(|| bouncer.start_anew(&stack.postgres, &mixing));
    bed.insert_due(&queue, 50).await;
    let line = service.until_logged(REFUSED).await;
    assert!(line.contains("max_prepared_statements above 0"), "{line}");
    assert_eq!(bed.client.depth(&queue).await, Some(0));
    disturb(|| bouncer.start_anew(&stack.postgres, &[]));
    service.until_ready().await;
    let retried = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";
    bed.until_count(retried, 50).await;
    assert_eq!(bed.client.depth(&queue).await, Some(50));
}
