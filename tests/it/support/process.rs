//! Runs the compiled binary as a process, as an operator would.

use std::{
    net::SocketAddr,
    process::{ExitStatus, Stdio},
    sync::{Arc, Mutex},
};

use testkit::lock;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    task::JoinHandle,
};

use super::{PATIENCE, eventually};

/// A process of the binary. Its log is read while it runs.
pub struct Process {
    child: Child,
    log: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
}

impl Process {
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let log = Arc::new(Mutex::new(String::new()));
        let mut lines = BufReader::new(child.stderr.take().expect("its stderr")).lines();
        let reader = tokio::spawn({
            let log = log.clone();
            async move {
                while let Ok(Some(line)) = lines.next_line().await {
                    let mut log = lock(&log);
                    log.push_str(&line);
                    log.push('\n');
                }
            }
        });
        Self { child, log, reader }
    }

    /// Everything that the process has logged so far.
    pub fn log(&self) -> String {
        lock(&self.log).clone()
    }

    /// Waits until a line of the log contains `text`, and returns the line.
    pub async fn until_logged(&self, text: &str) -> String {
        eventually(&format!("it logs {text:?}"), || async {
            let log = self.log();
            log.lines().find(|l| l.contains(text)).map(str::to_owned)
        })
        .await
    }

    /// Where the process answers HTTP, according to its log.
    pub async fn address(&self) -> SocketAddr {
        let line = self.until_logged("\"listening\"").await;
        let line: serde_json::Value = serde_json::from_str(&line).expect("a JSON line");
        let address = line["address"].as_str().expect("an address");
        address.parse().expect("an address")
    }

    /// Sends `GET path`, and returns the status and the body of the answer.
    pub async fn get(&self, path: &str) -> (u16, String) {
        testkit::get(self.address().await, path)
            .await
            .expect("an answer")
    }

    /// Waits until `/ready` answers with 200.
    pub async fn until_ready(&self) {
        eventually("the process is ready", || async {
            (self.get("/ready").await.0 == 200).then_some(())
        })
        .await;
    }

    /// The most memory that the process ever had resident, in MiB, as Linux tells it.
    pub fn peak_memory(&self) -> u64 {
        let pid = self.child.id().expect("it still runs");
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().next());
        let kib: u64 = kib.expect("VmHWM").parse().expect("a number");
        kib / 1024
    }

    /// Sends a signal by the name that `kill` uses, such as `TERM`.
    pub async fn signal(&self, name: &str) {
        let pid = self.child.id().expect("it still runs");
        let sent = Command::new("sh")
            .arg("-c")
            .arg(format!("kill -{name} {pid}"))
            .status()
            .await
            .expect("kill runs");
        assert!(sent.success(), "the signal is sent");
    }

    /// Waits until the process ends; returns its exit status and all that it logged.
    pub async fn ended(mut self) -> (ExitStatus, String) {
        let status = tokio::time::timeout(PATIENCE, self.child.wait())
            .await
            .expect("the process ends")
            .expect("its status");
        self.reader.await.expect("its log is read");
        let log = lock(&self.log).clone();
        (status, log)
    }
}
