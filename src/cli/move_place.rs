//! `move`: gives the database to another broker, virtual host or intake queue.

use anyhow::{bail, ensure};
use clap::Args;
use uuid::Uuid;

use super::actor;
use crate::{
    broker::{Broker, Introduction},
    config::Settings,
    place,
    store::{Store, place::Kept},
};

#[derive(Debug, Args)]
pub(super) struct Move {
    /// Move it although messages wait in the database: they go to the queues of their names at the new place.
    #[arg(long)]
    yes: bool,
}

impl Move {
    pub(super) async fn run(self, settings: &Settings) -> anyhow::Result<()> {
        let store = Store::open(settings, "command-line")?;
        store.inspect().await?;
        let from = store.place().await?;
        let here = Broker::new(settings)?.introduction().await?;
        let moved = self.move_to(&here, settings, &store, from).await;
        here.close().await;
        moved
    }

    async fn move_to(
        self,
        here: &Introduction,
        settings: &Settings,
        store: &Store,
        from: Option<Kept>,
    ) -> anyhow::Result<()> {
        let to = Kept {
            place: here.place(&settings.retry_queue),
            mark: Uuid::new_v4(),
        };
        if let Some(from) = &from {
            println!("from  {}", from.place);
        }
        println!("to    {}", to.place);
        if let Some(from) = &from
            && place::is_at(here, &to.place, from).await?
        {
            println!("The database belongs there already.");
            return Ok(());
        }
        let waiting = store.backlog().await?.pending;
        if waiting > 0 && !self.yes {
            bail!(
                "{waiting} messages wait in the database, and would go to the queues of their names \
                 at the new place: say --yes if they shall"
            );
        }
        here.put(to.mark).await?;
        let moved = store.move_place(from.as_ref(), &to, &actor()).await;
        if !matches!(moved, Ok(true)) {
            here.remove(to.mark).await;
        }
        ensure!(moved?, "somebody else has just moved the database");
        println!("Moved, with {waiting} messages that wait.");
        Ok(())
    }
}
