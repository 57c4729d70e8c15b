//! Settles which place the database belongs to: learns at the start where this instance is,
//! takes the database for that place if it has none, and refuses to work at another one.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    broker::{Broker, BrokerError, Home, Introduction},
    domain::place::Place,
    store::{Store, StoreError, place::Kept},
};

/// How often a running instance looks whether the database was moved away.
const LOOK: Duration = Duration::from_secs(5);

/// Why an instance does not have its place.
#[derive(Debug, thiserror::Error)]
pub enum Unsettled {
    /// The database belongs to another place: waiting does not help.
    #[error("{0}")]
    Refused(String),
    /// The broker could not be asked.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The database could not be asked.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Takes the database for the place of this instance, unless it belongs to one; from then on
/// `broker` connects to no other.
pub async fn settle(store: &Store, broker: &Broker, queue: &str) -> Result<Kept, Unsettled> {
    let introduction = broker.introduction().await?;
    let settled = take(store, &introduction, queue).await;
    introduction.close().await;
    let kept = settled?;
    broker.settle_at(Home {
        broker: kept.place.broker.clone(),
        mark: kept.mark,
    });
    Ok(kept)
}

async fn take(store: &Store, here: &Introduction, queue: &str) -> Result<Kept, Unsettled> {
    let place = here.place(queue);
    let kept = match store.place().await? {
        Some(kept) => kept,
        None => take_first(store, here, &place).await?,
    };
    if !is_at(here, &place, &kept).await? {
        return Err(Unsettled::Refused(place.refusal(&kept.place)));
    }
    here.put(kept.mark).await?;
    Ok(kept)
}

/// Several instances may get here at once, each by way of another node. So the mark is put
/// before it is written down: whoever reads it finds it on every node.
async fn take_first(store: &Store, here: &Introduction, place: &Place) -> Result<Kept, Unsettled> {
    let wanted = Kept {
        place: place.clone(),
        mark: Uuid::new_v4(),
    };
    here.put(wanted.mark).await?;
    let kept = store.take_place(&wanted).await?;
    if kept.mark != wanted.mark {
        here.remove(wanted.mark).await;
    }
    Ok(kept)
}

/// Whether an instance at `place` may work on a database that belongs to `kept`.
pub async fn is_at(here: &Introduction, place: &Place, kept: &Kept) -> Result<bool, BrokerError> {
    if !place.is_alike(&kept.place) {
        return Ok(false);
    }
    Ok(place.broker == kept.place.broker || here.bears(kept.mark).await?)
}

/// Runs until cancelled, or fails when somebody has moved the database to another place. An
/// instance that went on would send messages of the new place to the queues of the old one.
pub async fn stay(
    store: Store,
    settled: Kept,
    cancelled: CancellationToken,
) -> Result<(), Unsettled> {
    while !cancelled.is_cancelled() {
        // While Postgres cannot be asked, nothing can be claimed either.
        if let Ok(Some(kept)) = store.place().await
            && kept.mark != settled.mark
        {
            return Err(Unsettled::Refused(settled.place.refusal(&kept.place)));
        }
        cancelled
            .run_until_cancelled(tokio::time::sleep(LOOK))
            .await;
    }
    Ok(())
}
