//! Crash after crash, on quorum queues that give up what was delivered too often: no message
//! that is not at fault may be counted out.

use crate::support::{Bed, Process, eventually, message, quorum};

const ROWS: &str = "SELECT count(*) FROM retry_queue";

/// How many instances wait at the barrier.
const WAITING: &str = "
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event = 'advisory'";

/// Lets no more rows be inserted than the table `allowed` says. An instance that inserts one
/// more waits, with its deliveries in hand.
const BARRIER: &str = "
    CREATE TABLE allowed (n BIGINT);
    INSERT INTO allowed VALUES (0);
    CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF (SELECT count(*) FROM retry_queue) >= (SELECT n FROM allowed) THEN
            PERFORM pg_advisory_xact_lock(1);
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER wait BEFORE INSERT ON retry_queue FOR EACH ROW EXECUTE FUNCTION wait()";

#[tokio::test(flavor = "multi_thread")]
async fn twenty_five_kills_with_deliveries_in_hand_lose_nothing_though_the_limit_is_twenty() {
    const MESSAGES: i64 = 50;
    let mut bed = Bed::new().await;
    bed.migrate().await;
    bed.set("MIGRATE_ON_START", "false");
    sqlx::raw_sql(BARRIER)
        .execute(&bed.db)
        .await
        .expect("a barrier");
    let mut keeper = bed.db.acquire().await.expect("a connection");
    sqlx::query("SELECT pg_advisory_lock(1)")
        .execute(&mut *keeper)
        .await
        .expect("the lock");
    let (intake, work) = (bed.intake(), bed.declare("work").await);
    bed.client.declare_with(&intake, quorum(Some(20))).await;
    let messages: Vec<_> = (0..MESSAGES)
        .map(|n| message(&work, format!("job {n}")))
        .collect();
    bed.client.send_all(&intake, &messages).await;

    for kill in 0..25 {
        // Every other life is killed before it has stored anything.
        if kill % 2 == 1 {
            bed.arrange("UPDATE allowed SET n = n + 4").await;
        }
        let mut command = bed.command();
        command.arg("serve");
        let service = Process::spawn(command);
        bed.until_count(WAITING, 1).await;
        service.signal("KILL").await;
        service.ended().await;
        bed.arrange(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE datname = current_database() AND wait_event = 'advisory'",
        )
        .await;
        bed.until_count(WAITING, 0).await;
        eventually("the broker has noticed", || async {
            let stored = bed.count(ROWS).await;
            (bed.client.consumers(&intake).await == Some(0)
                && bed.client.depth(&intake).await.map(i64::from) >= Some(MESSAGES - stored))
            .then_some(())
        })
        .await;
    }

    assert_eq!(bed.count(ROWS).await, 48, "what the lives were allowed");
    bed.arrange("UPDATE allowed SET n = 1000000").await;
    sqlx::query("SELECT pg_advisory_unlock(1)")
        .execute(&mut *keeper)
        .await
        .expect("unlocked");
    let service = bed.start().await;
    bed.until_count(ROWS, MESSAGES).await;
    service.stop().await;
    assert_eq!(bed.client.depth(&intake).await, Some(0));
    assert_eq!(bed.client.depth(&bed.review()).await, Some(0));
}
