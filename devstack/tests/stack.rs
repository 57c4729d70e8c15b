//! Starts and stops real services in every way, also by killing the process that owns them.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may fail it")]

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use devstack::{Options, Postgres, RabbitMq, Stack, speaks_amqp};

type Stop<Service> = fn(&Service) -> anyhow::Result<()>;

#[test]
fn postgres_comes_back_with_its_data_on_its_port_however_it_was_stopped() {
    let postgres = Postgres::start_temporary("again").unwrap();
    let url = postgres.create_database("some").unwrap();
    assert_eq!(
        postgres.create_database("some").unwrap(),
        url,
        "an existing database is no error"
    );
    postgres
        .psql("some", "CREATE TABLE kept (way text)")
        .unwrap();
    let ways: [(&str, Stop<Postgres>); 3] = [
        ("fast", Postgres::stop),
        ("immediate", Postgres::stop_immediate),
        ("kill", Postgres::kill),
    ];
    for (way, stop) in ways {
        postgres
            .psql("some", &format!("INSERT INTO kept VALUES ('{way}')"))
            .unwrap();
        stop(&postgres).unwrap();
        assert!(postgres.psql("some", "SELECT 1").is_err(), "{way} stops it");
        postgres.start_again().unwrap();
    }
    assert_eq!(
        postgres.psql("some", "SELECT way FROM kept").unwrap(),
        "fast\nimmediate\nkill"
    );
    assert_eq!(
        postgres.psql("some", "SHOW synchronous_commit").unwrap(),
        "on"
    );
}

#[test]
fn rabbitmq_comes_back_with_its_data_on_its_port_however_it_was_stopped() {
    let rabbitmq = RabbitMq::start_temporary("again").unwrap();
    let ways: [(&str, Stop<RabbitMq>); 2] = [("stop", RabbitMq::stop), ("kill", RabbitMq::kill)];
    for (way, stop) in ways {
        rabbitmq.ctl(&["add_user", way, "secret"]).unwrap();
        stop(&rabbitmq).unwrap();
        assert!(!speaks_amqp(rabbitmq.port()), "{way} stops it");
        rabbitmq.start_again().unwrap();
        assert!(speaks_amqp(rabbitmq.port()));
    }
    let users = rabbitmq.ctl(&["list_users"]).unwrap();
    assert!(users.contains("stop") && users.contains("kill"), "{users}");

    let alarms = || {
        rabbitmq
            .ctl(&["eval", "rabbit_alarm:get_alarms()."])
            .unwrap()
    };
    rabbitmq.raise_memory_alarm().unwrap();
    until("the alarm is raised", || alarms().contains("memory"));
    rabbitmq.clear_memory_alarm().unwrap();
    until("the alarm is cleared", || alarms() == "[]");
    rabbitmq.close_all_connections("a test").unwrap();
}

/// Does nothing unless `cargo dev test --postgres` or `--rabbitmq` runs it.
#[test]
fn the_version_that_was_asked_for_runs_and_leaves_no_mount() {
    // The root's name ends with the version.
    let is_wanted = |variable: &str, version: &str| {
        let root = env::var_os(variable).map(PathBuf::from);
        let name = root
            .unwrap()
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned();
        let (_, wanted) = name.split_once('-').unwrap();
        assert!(
            wanted == "sid" || version.starts_with(&format!("{wanted}.")),
            "{version} is not {wanted}"
        );
    };
    if env::var_os(devstack::POSTGRES_ROOT).is_some() {
        let postgres = Postgres::start_temporary("version").unwrap();
        is_wanted(devstack::POSTGRES_ROOT, &postgres.version().unwrap());
        let user = fs::metadata(postgres.data_dir()).unwrap().uid();
        assert_ne!(user, 0, "it does not run as root");
        let standby = postgres.standby().unwrap();
        postgres.kill().unwrap();
        postgres.promote(standby).unwrap();
        assert_eq!(postgres.psql("postgres", "SELECT 1").unwrap(), "1");
    }
    if env::var_os(devstack::RABBITMQ_ROOT).is_some() {
        let rabbitmq = RabbitMq::start_temporary("version").unwrap();
        is_wanted(devstack::RABBITMQ_ROOT, &rabbitmq.version().unwrap());
    }
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(" /usr "), "{mounts}");
}

#[test]
fn stacks_side_by_side_do_not_disturb_each_other() {
    let (one, other) = thread::scope(|scope| {
        let one = scope.spawn(|| Stack::start_temporary("side").unwrap());
        let other = Stack::start_temporary("side").unwrap();
        (one.join().unwrap(), other)
    });
    assert_ne!(one.rabbitmq.port(), other.rabbitmq.port());
    one.postgres.create_database("mine").unwrap();
    assert_eq!(
        other
            .postgres
            .psql(
                "postgres",
                "SELECT 1 FROM pg_database WHERE datname = 'mine'"
            )
            .unwrap(),
        ""
    );
    drop(one);
    assert_eq!(other.postgres.psql("postgres", "SELECT 1").unwrap(), "1");
    assert!(speaks_amqp(other.rabbitmq.port()));
    other.rabbitmq.ctl(&["list_queues"]).unwrap();
}

#[test]
fn a_paused_service_answers_nothing_until_it_is_resumed() {
    let postgres = Postgres::start_temporary("pause").unwrap();
    postgres.pause().unwrap();
    thread::scope(|scope| {
        let asked = scope.spawn(|| postgres.psql("postgres", "SELECT 1"));
        thread::sleep(Duration::from_millis(300));
        assert!(!asked.is_finished());
        postgres.resume().unwrap();
        assert_eq!(asked.join().unwrap().unwrap(), "1");
    });
    postgres.pause().unwrap();
    postgres.stop().unwrap();
    postgres.start_again().unwrap();
}

#[test]
fn a_directory_keeps_its_data_and_has_one_owner() {
    let options = Options {
        dir: scratch("kept"),
        durable: false,
        quiet: true,
    };
    let first = Postgres::start(&options).unwrap();
    first.create_database("kept").unwrap();
    let refused = format!("{:#}", Postgres::start(&options).unwrap_err());
    assert!(
        refused.contains(&format!("in use by process {}", process::id())),
        "{refused}"
    );
    let port = first.port();
    drop(first);

    let second = Postgres::start(&options).unwrap();
    assert_eq!(
        second.port(),
        port,
        "the address stays the same between runs"
    );
    assert_eq!(second.psql("kept", "SELECT 1").unwrap(), "1");
    drop(second);
    fs::remove_dir_all(&options.dir).unwrap();
}

#[test]
fn a_stale_pid_file_that_names_a_living_stranger_is_no_obstacle() {
    let options = Options {
        dir: scratch("stale"),
        durable: false,
        quiet: true,
    };
    let postgres = Postgres::start(&options).unwrap();
    let (data, pid) = (postgres.data_dir(), process::id());
    drop(postgres);
    fs::write(
        data.join("postmaster.pid"),
        format!("{pid}\n{}\n", data.display()),
    )
    .unwrap();
    fs::write(
        data.join("../postgres.pid"),
        format!("{pid} {}\n", data.display()),
    )
    .unwrap();
    drop(Postgres::start(&options).unwrap());
    fs::remove_dir_all(&options.dir).unwrap();
}

#[test]
fn data_moves_to_the_temporary_directory_when_postgres_cannot_reach_it() {
    use std::os::unix::fs::PermissionsExt;
    let closed = scratch("closed");
    fs::create_dir_all(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
    let options = Options {
        dir: closed.join("postgres"),
        durable: false,
        quiet: true,
    };
    let postgres = Postgres::start(&options).unwrap();
    let data = postgres.data_dir();
    let as_root = !data.starts_with(&closed);
    drop(postgres);
    if as_root {
        let again = Postgres::start(&options).unwrap();
        assert_eq!(again.data_dir(), data, "the same place for the same wish");
        drop(again);
        fs::remove_dir_all(data.parent().unwrap()).unwrap();
    }
    fs::remove_dir_all(&closed).unwrap();
}

#[test]
fn a_killed_owner_leaves_no_process_and_no_directory() {
    let mut owner = Owner::start("temporary");
    let services = owner.services();
    assert_eq!(
        services.len(),
        3,
        "Postgres, RabbitMQ and epmd: {services:?}"
    );
    owner.kill();
    until("all processes are gone", || {
        !services.iter().any(|&pid| is_alive(pid))
    });
    until("the directory is gone", || !owner.directory().exists());
}

#[test]
fn a_killed_owner_of_a_paused_postgres_leaves_no_process() {
    let mut owner = Owner::start("paused");
    let mut all = owner.services();
    all.extend(all.clone().into_iter().flat_map(children));
    assert!(all.len() > 3, "the postmaster and its children: {all:?}");
    owner.kill();
    until("all processes are gone", || {
        !all.iter().any(|&pid| is_alive(pid))
    });
}

#[test]
fn what_is_left_when_even_the_watchdog_was_killed_is_ended_by_the_next_owner() {
    let mut owner = Owner::start("kept");
    let services = owner.services();
    for watchdog in children(owner.child.id())
        .into_iter()
        .filter(|pid| !services.contains(pid))
    {
        Command::new("kill")
            .args(["-KILL", &watchdog.to_string()])
            .status()
            .unwrap();
    }
    owner.kill();
    assert!(
        services.iter().all(|&pid| is_alive(pid)),
        "nobody was left to stop it"
    );

    let options = Options {
        dir: owner.directory(),
        durable: false,
        quiet: true,
    };
    let postgres = Postgres::start(&options).unwrap();
    assert!(!services.iter().any(|&pid| is_alive(pid)));
    drop(postgres);
    fs::remove_dir_all(&options.dir).unwrap();
}

/// A process that starts services and is then killed. It is this test program, started again to run
/// only `the_owner`.
struct Owner {
    child: Child,
    report: PathBuf,
}

impl Owner {
    fn start(kind: &str) -> Self {
        let report = scratch(&format!("report-{kind}"));
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "the_owner", "--ignored"])
            .env("OWNER_KIND", kind)
            .env("OWNER_REPORT", &report)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        until("the owner has started everything", || report.exists());
        Self { child, report }
    }

    fn directory(&self) -> PathBuf {
        PathBuf::from(fs::read_to_string(&self.report).unwrap())
    }

    /// The children that are services; its other children are watchdogs.
    fn services(&self) -> Vec<u32> {
        let is_service = |pid: &u32| {
            let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
            ["postgres", "beam.smp", "epmd"]
                .iter()
                .any(|name| program.ends_with(name))
        };
        children(self.child.id())
            .into_iter()
            .filter(is_service)
            .collect()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.report);
    }
}

/// Not a test: the code that [`Owner`] runs as a process of its own.
#[test]
#[ignore = "runs as a process of other tests"]
fn the_owner() {
    let Some(report) = env::var_os("OWNER_REPORT").map(PathBuf::from) else {
        return;
    };
    let kept = |dir: PathBuf| {
        Postgres::start(&Options {
            dir,
            durable: false,
            quiet: true,
        })
        .unwrap()
    };
    let (postgres, directory);
    match env::var("OWNER_KIND").unwrap().as_str() {
        "temporary" => {
            let stack = devstack::shared();
            directory = stack
                .postgres
                .data_dir()
                .ancestors()
                .nth(2)
                .unwrap()
                .to_owned();
        }
        "paused" => {
            postgres = Postgres::start_temporary("owned").unwrap();
            postgres.pause().unwrap();
            directory = postgres.data_dir();
        }
        _ => {
            postgres = kept(scratch("owned"));
            directory = postgres.data_dir().parent().unwrap().to_owned();
        }
    }
    let unfinished = report.with_extension("new");
    fs::write(&unfinished, directory.to_str().unwrap()).unwrap();
    fs::rename(&unfinished, &report).unwrap();
    // The test kills this process. If the test has died before that, the process ends by itself
    // after a while.
    thread::sleep(Duration::from_secs(120));
}

fn scratch(name: &str) -> PathBuf {
    env::temp_dir().join(format!("devstack-test-{name}-{}", process::id()))
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "not within a minute: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn children(of: u32) -> Vec<u32> {
    let listing = Command::new("ps")
        .args(["-A", "-o", "pid=,ppid="])
        .output()
        .unwrap();
    let listing = String::from_utf8(listing.stdout).unwrap();
    let pairs = listing
        .lines()
        .filter_map(|line| line.trim().split_once(' '));
    let pairs =
        pairs.map(|(pid, parent)| (pid.parse().unwrap(), parent.trim().parse::<u32>().unwrap()));
    pairs
        .filter(|&(_, parent)| parent == of)
        .map(|(pid, _)| pid)
        .collect()
}

/// Whether a process runs. A zombie does not: when its parent was killed, it stays until whoever
/// inherits it reaps it.
fn is_alive(pid: u32) -> bool {
    let status = Path::new("/proc").join(pid.to_string()).join("status");
    fs::read_to_string(status).is_ok_and(|text| !text.contains("State:\tZ"))
}
