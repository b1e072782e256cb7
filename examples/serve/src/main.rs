//! `serve`: an OpenAI-compatible server for models and conversations larger than memory.

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use outcore_serve::args::Args;
use outcore_serve::http::{App, router, serve};
use outcore_serve::open::open;
use outcore_serve::tenants::Tenants;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Threads for the network: they wait most of the time, and must not take the cores from computing.
const NETWORK_THREADS: usize = 2;
/// Threads for what takes a moment: tokens of prompts, scrapes.
const BLOCKING_THREADS: usize = 8;
/// How often it looks whether answers have ended when it stops.
const LOOK_EVERY: Duration = Duration::from_millis(20);

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            let _ = writeln!(std::io::stderr(), "serve: {why}");
            ExitCode::FAILURE
        }
    }
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

fn run(args: &Args) -> Result<(), String> {
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
        let _ = writeln!(std::io::stdout(), "http://{address}");
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
