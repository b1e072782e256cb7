//! A server in this process, and clients that write bytes.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Parser;
use outcore_llm::synthetic::Spec;
use outcore_llm::{Arch, WeightType};
use outcore_serve::args::Args;
use outcore_serve::http::{App, router, serve};
use outcore_serve::open::open;
use outcore_serve::tenants::Tenants;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// Nothing that is waited for takes so long, even on a machine that is busy with other things.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// The synthetic model's longest sequence.
pub const CONTEXT: u64 = 16384;
/// Its token ids.
pub const VOCAB: u64 = 300;
/// What it is called.
pub const MODEL: &str = "small";
/// An answer that takes far longer than any test waits before it goes away.
pub const ENDLESS: &str = r#"{"prompt": [1, 2, 3], "max_tokens": 16000, "ignore_eos": true, "stream": true}"#;

/// A server that ends when this is dropped.
pub struct Server {
    pub app: Arc<App>,
    pub model: PathBuf,
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _folder: TempDir,
}

/// A model that runs in milliseconds.
pub fn small() -> Spec {
    Spec {
        arch: Arch::Llama,
        dtype: WeightType::Q8_0,
        layers: 2,
        dim: 64,
        heads: 2,
        kv_heads: 1,
        head_dim: 32,
        ffn_dim: 128,
        vocab: VOCAB,
        context: CONTEXT,
        tied: false,
        seed: 7,
        experts: None,
        window: 20,
    }
}

impl Server {
    /// Without tokens, and with the limits of the command line.
    pub fn start() -> Self {
        Self::with(&[], Tenants::single(None).unwrap(), |_| {})
    }

    /// With more arguments, these tenants, and what `change` makes of the settings.
    pub fn with(more: &[&str], tenants: Tenants, change: impl FnOnce(&mut App)) -> Self {
        Self::with_model(more, tenants, |_| {}, change)
    }

    /// As [`with`](Self::with), with what `patch` makes of the model's file.
    pub fn with_model(
        more: &[&str],
        tenants: Tenants,
        patch: impl FnOnce(&Path),
        change: impl FnOnce(&mut App),
    ) -> Self {
        let write = |path: &Path| {
            small().write_gguf(path).unwrap();
            patch(path);
        };
        Self::of(write, more, tenants, change)
    }

    /// As [`with`](Self::with), of the model that `write` writes.
    pub fn of(write: impl FnOnce(&Path), more: &[&str], tenants: Tenants, change: impl FnOnce(&mut App)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join(format!("{MODEL}.gguf"));
        write(&model);
        let mut args = vec!["serve", "--model", model.to_str().unwrap(), "--threads", "1"];
        if !more.contains(&"--kv-space") {
            args.extend(["--kv-space", "16MiB"]);
        }
        let args = Args::parse_from(args.into_iter().chain(more.iter().copied()));
        let opened = open(&args, &tenants).unwrap_or_else(|error| panic!("{}", error.in_full()));
        let mut app = App::new(&args, opened, tenants);
        change(&mut app);
        let app = Arc::new(app);
        let (stop, stopped) = oneshot::channel::<()>();
        let (tell, told) = mpsc::channel();
        let serving = app.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                let stop = async {
                    let _ = stopped.await;
                    let engine = serving.opened.engine.clone();
                    tokio::task::spawn_blocking(move || engine.stop()).await.unwrap();
                };
                serve(serving.clone(), router(serving.clone()), listener, stop).await;
            });
        });
        let (stop, thread) = (Some(stop), Some(thread));
        Self { app, model, address: told.recv().unwrap(), stop, thread, _folder: folder }
    }

    pub fn connect(&self) -> Client {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Client { stream, read: Vec::new() }
    }

    /// The answer to these bytes on a connection of their own.
    #[track_caller]
    pub fn ask(&self, bytes: impl AsRef<[u8]>) -> Answer {
        let mut client = self.connect();
        client.send(bytes);
        client.answer()
    }

    #[track_caller]
    pub fn get(&self, path: &str) -> Answer {
        self.ask(get(path))
    }

    #[track_caller]
    pub fn post(&self, path: &str, body: impl AsRef<[u8]>) -> Answer {
        self.ask(post(path, "", body))
    }

    /// A value of `/metrics`.
    pub fn metric(&self, name: &str) -> u64 {
        let answer = self.get("/metrics");
        assert_eq!(answer.status, 200);
        let text = answer.text();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    /// Waits until nothing is being answered, and looks that all blocks are free again.
    pub fn assert_nothing_is_held(&self) {
        let names = ["outcore_running_answers", "outcore_waiting_answers", "outcore_kv_blocks{state=\"used\"}"];
        let until = Instant::now() + PATIENCE;
        while names.iter().any(|name| self.metric(name) > 0) || self.app.opened.engine.unfinished() > 0 {
            assert!(Instant::now() < until, "{:?}", names.map(|name| (name, self.metric(name))));
            std::thread::yield_now();
        }
    }

    /// Whether it still does what it is for.
    pub fn assert_lives(&self) {
        assert_eq!(self.get("/health").status, 200);
        let answer = self.post("/v1/completions", r#"{"prompt": [5, 6], "max_tokens": 2, "ignore_eos": true}"#);
        assert_eq!(
            (answer.status, &answer.json()["usage"]["completion_tokens"]),
            (200, &json!(2)),
            "{}",
            answer.text()
        );
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "the server panicked");
    }
}

pub fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
}

/// A request with a body of JSON. `headers` are whole lines.
pub fn post(path: &str, headers: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{headers}\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// A connection.
pub struct Client {
    stream: TcpStream,
    /// Bytes that came and were not looked at.
    read: Vec<u8>,
}

impl Client {
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).unwrap();
    }

    /// Sends as much as the server takes: it may have ended the connection.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// Sends nothing more.
    pub fn finish(&mut self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }

    /// Reads on. False at the end of the connection.
    #[track_caller]
    fn more(&mut self) -> bool {
        let mut buffer = [0; 4096];
        match self.stream.read(&mut buffer) {
            Ok(count) => {
                self.read.extend_from_slice(&buffer[..count]);
                count > 0
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
            // A socket with a time limit is read again by whoever reads it.
            Err(error) if error.kind() == ErrorKind::Interrupted => true,
            Err(error) => panic!("{error} after {:?}", String::from_utf8_lossy(&self.read)),
        }
    }

    #[track_caller]
    fn take(&mut self, count: usize) -> Vec<u8> {
        while self.read.len() < count {
            assert!(self.more(), "the connection ended after {:?}", String::from_utf8_lossy(&self.read));
        }
        self.read.drain(..count).collect()
    }

    /// What comes up to and with `end`.
    #[track_caller]
    pub fn until(&mut self, end: &str) -> String {
        loop {
            if let Some(at) = self.read.windows(end.len()).position(|part| part == end.as_bytes()) {
                return String::from_utf8(self.take(at + end.len())).unwrap();
            }
            assert!(self.more(), "no {end:?} in {:?}", String::from_utf8_lossy(&self.read));
        }
    }

    /// What comes until the connection ends.
    pub fn rest(&mut self) -> Vec<u8> {
        while self.more() {}
        std::mem::take(&mut self.read)
    }

    /// The head of an answer.
    #[track_caller]
    pub fn head(&mut self) -> Answer {
        let head = self.until("\r\n\r\n");
        let (first, headers) = head.split_once("\r\n").unwrap();
        let status = first.strip_prefix("HTTP/1.").unwrap()[2..5].parse().unwrap();
        Answer { status, headers: headers.to_ascii_lowercase(), body: Vec::new() }
    }

    /// A whole answer.
    #[track_caller]
    pub fn answer(&mut self) -> Answer {
        let mut answer = self.head();
        if let Some(length) = answer.header("content-length") {
            answer.body = self.take(length.parse().unwrap());
        } else if answer.header("transfer-encoding") == Some("chunked") {
            loop {
                let size = usize::from_str_radix(self.until("\r\n").trim(), 16).unwrap();
                answer.body.extend(self.take(size));
                assert_eq!(self.until("\r\n"), "\r\n");
                if size == 0 {
                    break;
                }
            }
        } else if answer.status >= 200 {
            answer.body = self.rest();
        }
        answer
    }
}

pub struct Answer {
    pub status: u16,
    headers: String,
    pub body: Vec<u8>,
}

impl Answer {
    /// In lower case, as names are.
    #[track_caller]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|wrong| panic!("{wrong}: {} {:?}", self.status, self.text()))
    }

    /// Looks that it is an error of OpenAI's shape, with these values, and returns its message.
    #[track_caller]
    pub fn assert_error(&self, status: u16, kind: &str, param: Option<&str>, code: Option<&str>) -> String {
        assert_eq!(self.status, status, "{}", self.text());
        let message = self.assert_shape();
        let error = &self.json()["error"];
        assert_eq!(
            (&error["type"], &error["param"], &error["code"]),
            (&json!(kind), &json!(param), &json!(code)),
            "{error}"
        );
        message
    }

    /// Looks that it is an error of OpenAI's shape, and returns its message.
    #[track_caller]
    pub fn assert_shape(&self) -> String {
        assert_eq!(self.header("content-type"), Some("application/json"), "{} {}", self.status, self.text());
        let whole = self.json();
        let names = |value: &Value| {
            let mut names: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
            names.sort_unstable();
            names
        };
        assert_eq!(
            (names(&whole), names(&whole["error"])),
            (vec!["error".to_owned()], ["code", "message", "param", "type"].map(str::to_owned).to_vec())
        );
        let message = whole["error"]["message"].as_str().unwrap().to_owned();
        assert!(!message.is_empty() && message.len() < 1024 && !message.contains(char::is_control), "{message:?}");
        message
    }
}
