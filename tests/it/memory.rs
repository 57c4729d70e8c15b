//! How much memory the service needs, whatever waits for it.

use crate::support::{Bed, Process, message};

const MIB: usize = 1 << 20;

/// The service reads no more than INTAKE_MEMORY_BYTES ahead; what it reads passes through several
/// buffers on its way to Postgres, and back from there to RabbitMQ at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn large_messages_that_wait_fit_a_container_of_256_mb() {
    let bed = Bed::new().await;
    let (intake, work) = (bed.intake(), bed.declare("work").await);
    bed.client.declare(&intake).await;
    let sizes = [(24, 8 * MIB), (8, 16 * MIB)];
    for (n, size) in sizes {
        for _ in 0..n {
            let payload = vec![fastrand::u8(..); size];
            bed.client.send(&intake, &message(&work, payload)).await;
        }
    }
    let mut inbox = bed.client.consume(&work).await;
    let mut command = bed.command();
    command.arg("serve");
    let service = Process::spawn(command);
    for (n, size) in sizes {
        for _ in 0..n {
            let received = inbox.next().await.body.len();
            assert!(sizes.iter().any(|(_, s)| *s == received), "{size}");
        }
    }
    let peak = service.peak_memory();
    println!("peak: {peak} MiB");
    service.signal("TERM").await;
    service.ended().await;
    assert!(peak < 240, "{peak} MiB were resident");
}
