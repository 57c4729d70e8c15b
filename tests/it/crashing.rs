//! Crash after crash, on quorum queues that give up what was delivered too often: nothing that
//! is not at fault may be counted out.

use std::time::Duration;

use crate::support::{Bed, PATIENCE, Process, eventually, message, quorum};

const ROWS: &str = "SELECT count(*) FROM retry_queue";

/// Waits until the process holds deliveries, or has stored all there is.
async fn until_holding(bed: &Bed, service: &Process) {
    service.until_logged("intake is subscribed").await;
    let _ = bed;
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_five_kills_with_deliveries_in_hand_lose_nothing_that_a_limit_of_twenty_could_drop() {
    let bed = Bed::new().await;
    let _ = (PATIENCE, Duration::ZERO, ROWS);
    until_holding(&bed, todo!()).await;
}
