//! The program `serve`, from its arguments to its exit status.

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgMatches, CommandFactory, FromArgMatches};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::Args;
use crate::http::{App, router, serve};
use crate::open::open;
use crate::tenants::Tenants;

/// Threads for the network: they wait most of the time, and must not take the cores from computing.
const NETWORK_THREADS: usize = 2;
/// Threads for what takes a moment: tokens of prompts, scrapes.
const BLOCKING_THREADS: usize = 8;
/// How often it looks whether answers have ended when it stops.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The exit status of a server that failed.
const FAILED: u8 = 1;

/// Serves as the arguments say, of which the first is the program's name, until a signal stops it. Returns the exit
/// status, with which the process should end.
pub fn main_from(args: impl IntoIterator<Item = OsString>) -> u8 {
    match Args::command().try_get_matches_from(args) {
        Ok(given) => run(&given),
        Err(error) => explain(&error),
    }
}

/// As [`main_from`], of what [`Args`] parsed: for a program that has this one as a command.
pub fn run(given: &ArgMatches) -> u8 {
    let args = match Args::from_arg_matches(given) {
        Ok(args) => args,
        Err(error) => return explain(&error),
    };
    let log = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()))
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    // A process that has a log already keeps it.
    drop(log.try_init());
    match serve_until_signal(&args) {
        Ok(()) => 0,
        Err(why) => {
            // If standard error is closed, the message is lost.
            drop(writeln!(io::stderr(), "serve: {why}"));
            FAILED
        }
    }
}

/// Prints a help or what was not understood. Returns the exit status.
fn explain(error: &clap::Error) -> u8 {
    // If the stream is closed, the message is lost.
    drop(error.print());
    drop(io::stdout().flush());
    // clap has 0 and 2.
    error.exit_code().try_into().unwrap_or(FAILED)
}

fn tenants(args: &Args) -> Result<Tenants, String> {
    let tenants = match (&args.tenants, &args.token_file) {
        (Some(file), _) => Tenants::read(file)?,
        (None, Some(file)) => {
            let token = std::fs::read_to_string(file);
            let token = token.map_err(|error| format!("cannot read {}: {error}", file.display()))?;
            Tenants::single(Some(token.trim())).map_err(|why| format!("{}: {why}", file.display()))?
        }
        (None, None) => Tenants::single(None)?,
    };
    if !args.host.is_loopback() && !tenants.have_tokens() {
        return Err(format!(
            "at {} others could use the server: give --token-file or --tenants, or listen at 127.0.0.1",
            args.host
        ));
    }
    Ok(tenants)
}

fn serve_until_signal(args: &Args) -> Result<(), String> {
    let tenants = tenants(args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(NETWORK_THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start threads for the network: {error}"))?;
    runtime.block_on(async {
        // Before the model is opened: a port that is taken is known at once.
        let address = SocketAddr::new(args.host, args.port);
        let listener = TcpListener::bind(address).await;
        let listener =
            listener.map_err(|error| format!("cannot listen at {address}: {error} (choose another --port)"))?;
        let address = listener.local_addr().map_err(|error| error.to_string())?;
        let mut signals = [SignalKind::terminate(), SignalKind::interrupt()].map(signal);
        let [Ok(terminate), Ok(interrupt)] = &mut signals else { return Err("cannot wait for signals".into()) };
        let opened = tokio::task::block_in_place(|| open(args, &tenants)).map_err(|error| error.in_full())?;
        let engine = opened.engine.clone();
        let app = Arc::new(App::new(args, opened, tenants));
        tracing::info!("serving {} at http://{address}", app.name);
        // For whoever started it with port 0.
        let _ = writeln!(io::stdout(), "http://{address}");
        let stop = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("stopping: answers may take {} s more", args.drain);
            engine.drain();
            let until = tokio::time::Instant::now() + Duration::from_secs(args.drain.into());
            while engine.unfinished() > 0 && engine.broken().is_none() && tokio::time::Instant::now() < until {
                tokio::time::sleep(LOOK_EVERY).await;
            }
            let _ = tokio::task::spawn_blocking(move || engine.stop()).await;
        };
        serve(app.clone(), router(app), listener, stop).await;
        Ok(())
    })
}
