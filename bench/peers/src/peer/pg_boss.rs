//! pg-boss, which is for Node: pg-boss proper runs as a child process of the adapter, and answers
//! requests for batches in lines of JSON. Its processor time and memory count as the adapter's own,
//! as whoever uses pg-boss from another language would have both.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, ensure};
use chrono::{DateTime, SecondsFormat};
use retry_scheduler::wire::proto::RetryMessage;
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};
use testkit::lock;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::{Mutex as AsyncMutex, oneshot},
};

use super::{Peer, Stored};
use crate::adapter::Wake;

/// The id of the answer that says that pg-boss has started.
const STARTED: u64 = 0;

pub struct PgBoss {
    requests: AsyncMutex<ChildStdin>,
    waiting: Waiting,
    ids: AtomicU64,
    /// Killed when this is dropped. If the adapter is killed, it ends because its stdin does.
    _child: Child,
}

/// Who waits for the answer to which request.
type Waiting = Arc<Mutex<HashMap<u64, oneshot::Sender<Box<RawValue>>>>>;

/// The directory that pg-boss is installed in: in cargo's target directory, which this program is
/// in as well.
fn directory() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe()?;
    let target = program.ancestors().nth(2);
    Ok(target.context("no target directory")?.join("pg-boss"))
}

/// Installs pg-boss and the Node that it needs, at the versions of `package-lock.json`. Returns
/// `false` if there is no npm.
pub fn install() -> anyhow::Result<bool> {
    let directory = directory()?;
    std::fs::create_dir_all(&directory)?;
    let files = [
        ("package.json", include_str!("../../pg-boss/package.json")),
        (
            "package-lock.json",
            include_str!("../../pg-boss/package-lock.json"),
        ),
        ("boss.js", include_str!("../../pg-boss/boss.js")),
    ];
    for (name, text) in files {
        std::fs::write(directory.join(name), text)?;
    }
    let npm = std::process::Command::new("npm")
        .args(["ci", "--no-audit", "--no-fund", "--loglevel=error"])
        .current_dir(&directory)
        .stdout(Stdio::null())
        .status();
    match npm {
        Ok(ended) => {
            ensure!(ended.success(), "npm could not install pg-boss");
            Ok(true)
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e).context("starting npm"),
    }
}

impl PgBoss {
    async fn request<T: for<'de> Deserialize<'de>>(
        &self,
        verb: &str,
        argument: &Value,
    ) -> anyhow::Result<T> {
        let id = self.ids.fetch_add(1, Ordering::Relaxed) + 1;
        let answer = expect(&self.waiting, id);
        let mut line = serde_json::to_vec(&json!([id, verb, argument]))?;
        line.push(b'\n');
        self.requests.lock().await.write_all(&line).await?;
        let answer = answer.await.context("pg-boss has ended")?;
        Ok(serde_json::from_str(answer.get())?)
    }
}

fn expect(waiting: &Waiting, id: u64) -> oneshot::Receiver<Box<RawValue>> {
    let (sender, receiver) = oneshot::channel();
    lock(waiting).insert(id, sender);
    receiver
}

/// Hands answers to those who wait for them, until pg-boss ends. Then nobody waits any more.
async fn hand_out(answers: ChildStdout, waiting: Waiting) {
    let mut lines = BufReader::new(answers).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let Ok((id, answer)) = serde_json::from_str::<(u64, Box<RawValue>)>(&line) else {
            break;
        };
        if let Some(sender) = lock(&waiting).remove(&id) {
            let _ = sender.send(answer);
        }
    }
    lock(&waiting).clear();
}

#[derive(Deserialize)]
struct Job {
    id: String,
    data: Stored,
}

impl Peer for PgBoss {
    type Handle = String;

    /// The shortest interval that pg-boss's own workers may poll at; their default is 2 s. The
    /// notifications are an option.
    const NAP: Duration = Duration::from_millis(500);

    async fn open(database_url: &str, _: Wake) -> anyhow::Result<Self> {
        let directory = directory()?;
        let mut child = Command::new(directory.join(Path::new("node_modules/.bin/node")))
            .arg("boss.js")
            .current_dir(&directory)
            .env("DATABASE_URL", database_url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("starting Node")?;
        let requests = child.stdin.take().context("no stdin")?;
        let answers = child.stdout.take().context("no stdout")?;
        let waiting = Waiting::default();
        let started = expect(&waiting, STARTED);
        tokio::spawn(hand_out(answers, waiting.clone()));
        started.await.context("pg-boss did not start")?;
        Ok(Self {
            requests: AsyncMutex::new(requests),
            waiting,
            ids: AtomicU64::new(STARTED),
            _child: child,
        })
    }

    async fn enqueue(&self, messages: Vec<RetryMessage>) -> anyhow::Result<()> {
        let jobs: Vec<Value> = messages
            .into_iter()
            .map(|message| {
                let due_ms = Some(message.next_retry_at_ms).filter(|ms| *ms > 0);
                let due = due_ms.and_then(DateTime::from_timestamp_millis);
                let mut job = json!({ "data": Stored::from(message) });
                if let Some(due) = due {
                    job["startAfter"] = due.to_rfc3339_opts(SecondsFormat::Millis, true).into();
                }
                job
            })
            .collect();
        self.request("insert", &jobs.into()).await
    }

    async fn fetch(&self, most: usize) -> anyhow::Result<Vec<(RetryMessage, String)>> {
        let jobs: Vec<Job> = self.request("fetch", &most.into()).await?;
        let messages = jobs
            .into_iter()
            .map(|job| Ok((job.data.try_into()?, job.id)));
        messages.collect()
    }

    async fn done(&self, handles: Vec<String>) -> anyhow::Result<()> {
        self.request("complete", &handles.into()).await
    }
}
