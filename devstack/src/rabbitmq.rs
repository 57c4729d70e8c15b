//! Starts and stops a private RabbitMQ, with an epmd of its own: Erlang's port mapper, through
//! which rabbitmqctl finds the broker.

use std::env;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use crate::amqp::{self, speaks_amqp};
use crate::lock::Lock;
use crate::ports;
use crate::process;
use crate::programs::RabbitMqPrograms;
use crate::service::Service;
use crate::watchdog::Watchdog;
use crate::{ATTEMPTS, Options, temporary_directory};

/// How long the start may take.
const START: Duration = Duration::from_secs(120);

/// How long a stop may take before the processes are killed.
const STOP: Duration = Duration::from_secs(30);

/// The limits at which RabbitMQ blocks publishers are absolute, so that they do not depend on the
/// size of the machine: publishers should be blocked only where a test wants it.
const CONFIGURATION: &str = "\
vm_memory_high_watermark.absolute = 2GB
disk_free_limit.absolute = 50MB
";

/// What the service asks of any broker that it runs on.
const REQUIRED: &str = include_str!("../../ops/rabbitmq/retry-scheduler.conf");

/// The file that holds the secret by which nodes and rabbitmqctl trust each other, in a node's `HOME`.
const COOKIE: &str = ".erlang.cookie";

/// A RabbitMQ of our own on the loopback interface. It is stopped when this value is dropped, or by
/// a watchdog when this process ends.
#[derive(Debug)]
pub struct RabbitMq {
    programs: RabbitMqPrograms,
    directory: PathBuf,
    node: String,
    temporary: bool,
    with_management: bool,
    ports: Ports,
    server: Service,
    /// `None` if the node uses that of another one.
    epmd: Option<Service>,
    // The last field, so that the lock is released after everything else is stopped.
    _lock: Lock,
}

/// What kind of node is started.
#[derive(Clone, Copy)]
struct Kind<'a> {
    temporary: bool,
    with_management: bool,
    /// The node whose epmd and cookie are used, so that the two find and trust each other.
    first: Option<&'a RabbitMq>,
}

impl Kind<'_> {
    const TEMPORARY: Self = Self {
        temporary: true,
        with_management: false,
        first: None,
    };
}

#[derive(Clone, Copy, Debug)]
struct Ports {
    amqp: u16,
    distribution: u16,
    epmd: u16,
    /// Unused unless the management plugin is enabled.
    management: u16,
}

impl RabbitMq {
    /// Starts RabbitMQ with its data in `options.dir`, which is created if need be. It also reads the
    /// configuration files in the directory `conf.d` there.
    pub fn start(options: &Options) -> Result<Self> {
        Self::start_in(options, false)
    }

    /// Starts an empty RabbitMQ. Its directory is temporary and deleted when it has stopped.
    pub fn start_temporary(name: &str) -> Result<Self> {
        Self::start_temporary_with(name, RabbitMqPrograms::find_or_install()?)
    }

    /// Does what [`RabbitMq::start_temporary`] does, with these programs.
    pub fn start_temporary_with(name: &str, programs: RabbitMqPrograms) -> Result<Self> {
        let dir = temporary_directory(name).join("rabbitmq");
        let options = Options {
            dir,
            durable: false,
            quiet: true,
        };
        Self::start_with(&options, Kind::TEMPORARY, programs)
    }

    /// Starts another node and makes it a member of the cluster of this one. Its directory is
    /// temporary, and it must not outlive this value, whose epmd it uses.
    pub fn start_member(&self, name: &str) -> Result<Self> {
        let options = Options {
            dir: temporary_directory(name).join("rabbitmq"),
            durable: false,
            quiet: true,
        };
        let kind = Kind {
            first: Some(self),
            ..Kind::TEMPORARY
        };
        let node = Self::start_with(&options, kind, self.programs.clone())?;
        for command in [
            &["stop_app"][..],
            &["join_cluster", &self.node],
            &["start_app"],
        ] {
            node.ctl(command)?;
        }
        Ok(node)
    }

    /// Does what [`RabbitMq::start_temporary`] does, and enables the management plugin, which makes
    /// the start a few seconds slower.
    pub fn start_temporary_with_management(name: &str) -> Result<Self> {
        let options = Options {
            dir: temporary_directory(name).join("rabbitmq"),
            durable: false,
            quiet: true,
        };
        let kind = Kind {
            with_management: true,
            ..Kind::TEMPORARY
        };
        Self::start_with(&options, kind, RabbitMqPrograms::find_or_install()?)
    }

    pub(crate) fn start_in(options: &Options, temporary: bool) -> Result<Self> {
        let programs = RabbitMqPrograms::find_or_install()?;
        let kind = Kind {
            temporary,
            ..Kind::TEMPORARY
        };
        Self::start_with(options, kind, programs)
    }

    fn start_with(options: &Options, kind: Kind<'_>, programs: RabbitMqPrograms) -> Result<Self> {
        let Kind {
            temporary,
            with_management,
            first,
        } = kind;
        let started = Instant::now();
        let directory = options.dir.clone();
        fs::create_dir_all(directory.join("conf.d"))
            .with_context(|| format!("Failed to create {}", directory.display()))?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700))?;
        let lock = Lock::acquire(
            &directory.join("lock"),
            &format!("The RabbitMQ in {}", directory.display()),
        )?;
        let watchdog = Arc::new(Watchdog::start(
            Some(lock.share()?),
            temporary.then_some(directory.as_path()),
        )?);
        let server = Service::new("rabbitmq", &directory, watchdog.clone());
        let epmd = match first {
            Some(_) => None,
            None => Some(Service::new("epmd", &directory, watchdog)),
        };
        for service in [&server].into_iter().chain(&epmd) {
            service.end_leftover(Signal::SIGTERM)?;
            let _ = fs::remove_file(service.log());
        }

        let seed = ports::hash(&directory.to_string_lossy());
        let node = format!("devstack-{seed:016x}@localhost");
        fs::write(
            directory.join("rabbitmq.conf"),
            [CONFIGURATION, REQUIRED].concat(),
        )
        .context("Failed to write rabbitmq.conf")?;
        fs::write(directory.join("advanced.config"), "[].\n")
            .context("Failed to write advanced.config")?;
        let plugins = if with_management {
            "[rabbitmq_management].\n"
        } else {
            "[].\n"
        };
        fs::write(directory.join("enabled_plugins"), plugins)
            .context("Failed to write enabled_plugins")?;
        match first {
            Some(first) => fs::copy(first.directory.join(COOKIE), directory.join(COOKIE))
                .map(drop)
                .context("Failed to copy .erlang.cookie")?,
            None => write_cookie(&directory)?,
        }

        let ports = Ports {
            amqp: 0,
            distribution: 0,
            epmd: 0,
            management: 0,
        };
        let mut rabbitmq = Self {
            programs,
            directory,
            node,
            temporary,
            with_management,
            ports,
            server,
            epmd,
            _lock: lock,
        };
        for attempt in 0..ATTEMPTS {
            let own: [u16; 4] = ports::free(seed.wrapping_add(attempt * 7))?;
            let [amqp, distribution, epmd, management] = own;
            rabbitmq.ports = Ports {
                amqp,
                distribution,
                epmd: first.map_or(epmd, |first| first.ports.epmd),
                management,
            };
            rabbitmq.configure_management()?;
            match rabbitmq.start_epmd().and_then(|()| rabbitmq.start_again()) {
                Ok(()) => break,
                Err(error) => {
                    rabbitmq.epmd.as_ref().map_or(Ok(()), Service::kill)?;
                    let lost = own.iter().any(|&port| !ports::is_free(port));
                    if !lost || attempt + 1 == ATTEMPTS {
                        return Err(error);
                    }
                }
            }
        }
        if !options.quiet {
            let seconds = started.elapsed().as_secs_f32();
            eprintln!(
                "devstack: RabbitMQ is ready on port {} after {seconds:.1} s",
                rabbitmq.ports.amqp
            );
        }
        Ok(rabbitmq)
    }

    /// Configures the management plugin, if it is enabled.
    fn configure_management(&self) -> Result<()> {
        if !self.with_management {
            return Ok(());
        }
        // The plugin knows what is gathered at these intervals, five seconds each by default.
        let configuration = format!(
            "management.tcp.ip = 127.0.0.1\nmanagement.tcp.port = {}\n\
             collect_statistics_interval = 1000\n",
            self.ports.management
        );
        let quorum = "[{rabbit, [{quorum_tick_interval, 1000}]}].\n";
        fs::write(self.directory.join("advanced.config"), quorum)
            .and_then(|()| {
                let path = self.directory.join("conf.d/10-management.conf");
                fs::write(path, configuration)
            })
            .context("Failed to write the management plugin's configuration")
    }

    /// Starts epmd as a process that we can stop. If it did not run, Erlang would start one itself,
    /// as a daemon that stays behind.
    fn start_epmd(&self) -> Result<()> {
        let Some(epmd) = &self.epmd else {
            return Ok(());
        };
        let port = self.ports.epmd.to_string();
        let configure = |command: &mut Command| {
            command
                .args(self.programs.command_line(&self.programs.epmd))
                .args(["-port", &port, "-address", "127.0.0.1"]);
            self.surroundings(command);
        };
        let marker = format!("-port {port}");
        epmd.start(
            Signal::SIGTERM,
            &marker,
            configure,
            Duration::from_secs(10),
            |_| TcpStream::connect((Ipv4Addr::LOCALHOST, self.ports.epmd)).is_ok(),
        )
    }

    /// Starts RabbitMQ after a stop, with the same port and data. Returns when it answers AMQP.
    pub fn start_again(&self) -> Result<()> {
        let configure = |command: &mut Command| {
            command.args(self.programs.command_line(&self.programs.server));
            self.surroundings(command);
        };
        let signal = if self.temporary {
            Signal::SIGKILL
        } else {
            Signal::SIGTERM
        };
        self.server
            .start(signal, &self.node, configure, START, |_| {
                speaks_amqp(self.ports.amqp)
            })
    }

    /// Sets the environment of a RabbitMQ program so that it uses none of the files and ports of
    /// other instances on this machine.
    fn surroundings(&self, command: &mut Command) {
        for (name, _) in env::vars_os() {
            let text = name.to_string_lossy();
            if ["RABBITMQ_", "ERL_", "ELIXIR_"]
                .iter()
                .any(|prefix| text.starts_with(prefix))
            {
                command.env_remove(name);
            }
        }
        let at = |name: &str| self.directory.join(name);
        command
            .current_dir(&self.directory)
            .env_remove("NOTIFY_SOCKET")
            .env("HOME", &self.directory)
            .env("ERL_EPMD_PORT", self.ports.epmd.to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("ERL_CRASH_DUMP", "/dev/null")
            .env("RABBITMQ_NODENAME", &self.node)
            .env("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_NODE_PORT", self.ports.amqp.to_string())
            .env("RABBITMQ_DIST_PORT", self.ports.distribution.to_string())
            .env("RABBITMQ_CONF_ENV_FILE", "/dev/null")
            .env("RABBITMQ_CONFIG_FILE", at("rabbitmq.conf"))
            .env("RABBITMQ_CONFIG_FILES", at("conf.d"))
            .env("RABBITMQ_ADVANCED_CONFIG_FILE", at("advanced.config"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", at("enabled_plugins"))
            .env("RABBITMQ_GENERATED_CONFIG_DIR", at("config"))
            .env("RABBITMQ_SCHEMA_DIR", at("schema"))
            .env("RABBITMQ_MNESIA_BASE", at("mnesia"))
            .env("RABBITMQ_FEATURE_FLAGS_FILE", at("feature_flags"))
            .env("RABBITMQ_LOG_BASE", &self.directory)
            // `-` is stdout, which goes to the log file of the service.
            .env("RABBITMQ_LOGS", "-")
            .env("TERM", "dumb")
            .env("RABBITMQ_PID_FILE", at("node.pid"))
            // Makes the start script `exec` Erlang instead of waiting for it, so that there is one
            // process to stop.
            .env("RABBITMQ_ALLOW_INPUT", "true")
            // Two scheduler threads without busy waiting, to leave the machine to others. Erlang
            // ignores `-devstack`: it marks the command line, by which the process is recognised.
            .env(
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS",
                format!(
                    "-noinput +S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none \
                     -kernel inet_dist_use_interface {{127,0,0,1}} -devstack {}",
                    self.node
                ),
            )
            .env(
                "RABBITMQ_CTL_ERL_ARGS",
                "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none",
            )
            // Without this, rabbitmqctl warns when the locale is not UTF-8.
            .env("ELIXIR_ERL_OPTIONS", "+fnu");
    }

    /// Stops RabbitMQ with SIGTERM, on which it shuts down in order.
    pub fn stop(&self) -> Result<()> {
        self.server.stop(Signal::SIGTERM, STOP)
    }

    /// Kills RabbitMQ with SIGKILL.
    pub fn kill(&self) -> Result<()> {
        self.server.kill()
    }

    /// Stops RabbitMQ with SIGSTOP: connections stay open, but nothing answers.
    pub fn pause(&self) -> Result<()> {
        self.server.pause()
    }

    /// Lets the processes run again after [`RabbitMq::pause`].
    pub fn resume(&self) -> Result<()> {
        self.server.resume()
    }

    /// The URL of the virtual host `/`.
    pub fn url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.ports.amqp)
    }

    /// The URL of the management API, if [`RabbitMq::start_temporary_with_management`] was used.
    pub fn management_url(&self) -> Option<String> {
        self.with_management
            .then(|| format!("http://127.0.0.1:{}", self.ports.management))
    }

    /// The AMQP port on 127.0.0.1. [`RabbitMq::start_again`] keeps it.
    pub fn port(&self) -> u16 {
        self.ports.amqp
    }

    /// The version that the broker gives itself.
    pub fn version(&self) -> Result<String> {
        amqp::version(self.ports.amqp).context("RabbitMQ does not tell its version")
    }

    /// Runs `rabbitmqctl --quiet` for this node and returns what it prints. A call takes a second
    /// or two.
    pub fn ctl(&self, args: &[&str]) -> Result<String> {
        let words = self.programs.command_line(&self.programs.ctl);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg("--quiet").args(args);
        self.surroundings(&mut command);
        process::output(&mut command)
    }

    /// Raises a memory alarm, on which the broker blocks all connections that publish.
    pub fn raise_memory_alarm(&self) -> Result<()> {
        self.ctl(&["set_vm_memory_high_watermark", "0"]).map(drop)
    }

    /// Ends the alarm of [`RabbitMq::raise_memory_alarm`].
    pub fn clear_memory_alarm(&self) -> Result<()> {
        self.ctl(&["set_vm_memory_high_watermark", "absolute", "2GB"])
            .map(drop)
    }

    /// Makes the broker close every connection.
    pub fn close_all_connections(&self, reason: &str) -> Result<()> {
        self.ctl(&["close_all_connections", reason]).map(drop)
    }

    /// The file that RabbitMQ writes its log to.
    pub fn log(&self) -> PathBuf {
        self.server.log()
    }
}

impl Drop for RabbitMq {
    fn drop(&mut self) {
        let server = if self.temporary {
            self.kill()
        } else {
            self.stop()
        };
        let epmd = self.epmd.as_ref().map_or(Ok(()), Service::kill);
        for error in [server, epmd].into_iter().filter_map(Result::err) {
            eprintln!("devstack: {error:#}");
        }
    }
}

/// Creates the secret by which rabbitmqctl may control the node. Only the owner may read it, since
/// Erlang refuses it otherwise.
fn write_cookie(directory: &Path) -> Result<()> {
    let path = directory.join(COOKIE);
    if path.exists() {
        return Ok(());
    }
    let mut random = [0; 16];
    File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut random))
        .context("No randomness")?;
    let cookie: String = random.iter().map(|byte| format!("{byte:02X}")).collect();
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o400)
        .open(&path);
    file.and_then(|mut file| file.write_all(cookie.as_bytes()))
        .context("Failed to write .erlang.cookie")
}
