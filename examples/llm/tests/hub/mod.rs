//! Models named `hf:owner/repo`, from a hub on the loopback interface.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::json;

use super::{MODELS, command, interrupt, last_line, refused, spec_of_shards, stdout_of, text};

/// Most connections a hub of a test answers.
const MOST: usize = 64;
/// Longest request head, in bytes.
const LONGEST: u64 = 16 << 10;
const PATIENCE: Duration = Duration::from_secs(30);

/// The part of the hub's protocol that a download needs: the list of files, and files by range, either directly or
/// through a redirect to where large files are kept.
struct Hub {
    address: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

struct Shelf {
    files: BTreeMap<String, Vec<u8>>,
    /// Told of the first download, which is then never finished.
    stall: Option<(Sender<()>, Mutex<Receiver<()>>)>,
    /// Cuts every body in half.
    cut: bool,
}

impl Shelf {
    fn of(files: BTreeMap<String, Vec<u8>>) -> Self {
        Self { files, stall: None, cut: false }
    }
}

impl Hub {
    fn start(shelf: Shelf) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (log, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (seen, ended) = (log.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            for connection in listener.incoming().take(MOST) {
                if ended.load(Ordering::SeqCst) {
                    return;
                }
                // A client that hangs up is the client's business.
                let _ = connection.and_then(|stream| answer(&stream, &shelf, address, &seen));
            }
        });
        Self { address, log, stop, thread: Some(thread) }
    }

    fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    fn command(&self, home: &Path, model: &str) -> Command {
        let mut command = command(&["--model", model, "--prompt-tokens", "1,2,3", "--tokens", "3", "--json"]);
        for proxy in ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN"] {
            command.env_remove(proxy);
        }
        command.env("HF_ENDPOINT", format!("http://{}", self.address)).env("HF_HOME", home);
        command
    }

    fn generate(&self, home: &Path, model: &str) -> Output {
        self.command(home, model).output().unwrap()
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes the thread that waits for a connection.
        drop(TcpStream::connect(self.address));
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

fn answer(stream: &TcpStream, shelf: &Shelf, address: SocketAddr, log: &Mutex<Vec<String>>) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut head = Vec::new();
    for line in BufReader::new(stream.take(LONGEST)).lines() {
        let line = line?;
        if line.is_empty() {
            break;
        }
        head.push(line);
    }
    let header = |name: &str| {
        head.iter()
            .filter_map(|line| line.split_once(": "))
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, v)| v)
    };
    let path = head.first().and_then(|line| line.split(' ').nth(1)).unwrap_or_default().to_owned();
    let range = header("range").and_then(|range| range.strip_prefix("bytes=")).unwrap_or("all").to_owned();
    let who = header("authorization").unwrap_or("nobody");
    log.lock().unwrap().push(format!("{path} {range} {who}"));

    if path == "/api/models/o/r/revision/main" {
        let names: Vec<_> = shelf.files.keys().map(|name| json!({"rfilename": name})).collect();
        let body = json!({"sha": "c0ffee", "siblings": names}).to_string();
        return reply(stream, "200 OK", "Content-Type: application/json\r\n", body.as_bytes(), body.len());
    }
    let direct = path.strip_prefix("/o/r/resolve/main/");
    let Some((name, body)) = direct.or(path.strip_prefix("/store/")).and_then(|n| shelf.files.get_key_value(n)) else {
        return reply(stream, "404 Not Found", "", b"Entry not found", 15);
    };
    // As on the hub, large files lie elsewhere.
    let about = format!("X-Repo-Commit: c0ffee\r\nETag: \"tag-of-{name}\"\r\n");
    if direct.is_some() && !name.ends_with(".json") {
        let more = format!("{about}X-Linked-ETag: \"tag-of-{name}\"\r\nLocation: http://{address}/store/{name}\r\n");
        return reply(stream, "302 Found", &more, b"", 0);
    }
    let (start, end) = range.split_once('-').unwrap_or(("0", ""));
    let start: usize = start.parse().unwrap_or(0);
    let end = end.parse().map_or(body.len(), |last: usize| last + 1).min(body.len());
    let Some(part) = body.get(start..end) else {
        return reply(stream, "416 Range Not Satisfiable", "", b"", 0);
    };
    let about = format!("{about}Content-Range: bytes {start}-{}/{}\r\n", end.saturating_sub(1), body.len());
    let whole = part.len() > 1;
    if let Some((begun, never)) = shelf.stall.as_ref().filter(|_| whole) {
        let _ = begun.send(());
        let _ = never.lock().unwrap().recv_timeout(PATIENCE);
        return Ok(());
    }
    let sent = if shelf.cut && whole { &part[..part.len() / 2] } else { part };
    reply(stream, "206 Partial Content", &about, sent, part.len())
}

fn reply(mut stream: &TcpStream, status: &str, headers: &str, body: &[u8], len: usize) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len}\r\n{headers}\r\n")?;
    stream.write_all(body)?;
    stream.flush()
}

fn small() -> BTreeMap<String, Vec<u8>> {
    let bytes = std::fs::read(&MODELS.small).unwrap();
    [("README.md".to_owned(), b"# A model".to_vec()), ("m.gguf".to_owned(), bytes)].into()
}

fn local(model: &Path) -> serde_json::Value {
    let args = ["--model", text(model), "--prompt-tokens", "1,2,3", "--tokens", "3", "--json"];
    last_line(stdout_of(&command(&args).output().unwrap()))
}

#[test]
fn a_model_is_fetched_once_and_then_found_in_the_cache() {
    let home = tempfile::tempdir().unwrap();
    let hub = Hub::start(Shelf::of(small()));
    let first = last_line(stdout_of(&hub.generate(home.path(), "hf:o/r")));
    assert_eq!(first["model"], "hf:o/r");
    assert_eq!(first["logits_xxh3"], local(&MODELS.small)["logits_xxh3"]);
    let downloads = || hub.log().iter().filter(|line| line.starts_with("/store/m.gguf 0- ")).count();
    assert_eq!(downloads(), 1, "{:?}", hub.log());

    let requests = hub.log().len();
    let second = last_line(stdout_of(&hub.generate(home.path(), "hf:o/r:m.gguf")));
    assert_eq!(second["logits_xxh3"], first["logits_xxh3"]);
    assert_eq!(hub.log().len(), requests, "a named file in the cache needs no hub: {:?}", hub.log());
    stdout_of(&hub.generate(home.path(), "hf:o/r"));
    assert_eq!(downloads(), 1);
    assert!(hub.log().iter().all(|line| line.ends_with(" nobody")), "{:?}", hub.log());
}

#[test]
fn a_token_is_sent_to_the_hub() {
    let home = tempfile::tempdir().unwrap();
    let hub = Hub::start(Shelf::of(small()));
    stdout_of(&hub.command(home.path(), "hf:o/r:m.gguf").env("HF_TOKEN", "secret").output().unwrap());
    assert!(hub.log()[0].ends_with(" Bearer secret"), "{:?}", hub.log());
}

#[test]
fn every_file_of_a_sharded_model_is_fetched() {
    let (home, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    spec_of_shards().write_safetensors(folder.path(), 3).unwrap();
    let files = std::fs::read_dir(folder.path()).unwrap().map(|entry| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    });
    let hub = Hub::start(Shelf::of(files.collect()));
    let run = last_line(stdout_of(&hub.generate(home.path(), "hf:o/r")));
    assert_eq!(run["logits_xxh3"], local(folder.path())["logits_xxh3"]);
    for number in 1..=3 {
        let name = format!("/store/model-0000{number}-of-00003.safetensors 0- ");
        assert_eq!(hub.log().iter().filter(|line| line.starts_with(&name)).count(), 1, "{:?}", hub.log());
    }
}

#[test]
fn regression_a_named_safetensors_file_brings_what_belongs_to_it() {
    for (shards, folder_name) in [(1, ""), (3, ""), (2, "sub/")] {
        let folder = tempfile::tempdir().unwrap();
        spec_of_shards().write_safetensors(folder.path(), shards).unwrap();
        let expected = local(folder.path())["logits_xxh3"].clone();
        let files: BTreeMap<_, _> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| {
                let name = format!("{folder_name}{}", entry.file_name().into_string().unwrap());
                (name, std::fs::read(entry.path()).unwrap())
            })
            .collect();
        let named: Vec<String> = files.keys().filter(|name| !name.ends_with("config.json")).cloned().collect();
        assert_eq!(named.len(), if shards == 1 { 1 } else { shards + 1 }, "{named:?}");
        for name in named {
            let (home, hub) = (tempfile::tempdir().unwrap(), Hub::start(Shelf::of(files.clone())));
            let run = last_line(stdout_of(&hub.generate(home.path(), &format!("hf:o/r:{name}"))));
            assert_eq!(run["logits_xxh3"], expected, "{name}");
        }
        // Shards without an index, found by their numbers.
        if shards == 3 {
            let mut files = files;
            files.remove("model.safetensors.index.json").unwrap();
            let (home, hub) = (tempfile::tempdir().unwrap(), Hub::start(Shelf::of(files)));
            let output = hub.generate(home.path(), "hf:o/r:model-00002-of-00003.safetensors");
            assert_eq!(last_line(stdout_of(&output))["logits_xxh3"], expected);
        }
    }
    let lonely = BTreeMap::from([("model.safetensors".to_owned(), vec![0])]);
    let (home, hub) = (tempfile::tempdir().unwrap(), Hub::start(Shelf::of(lonely)));
    refused(&hub.generate(home.path(), "hf:o/r:model.safetensors"), &["no config.json", "model.safetensors"]);
}

#[test]
fn what_the_hub_does_not_have_is_an_error() {
    let home = tempfile::tempdir().unwrap();
    let hub = Hub::start(Shelf::of(small()));
    let run = |model| hub.generate(home.path(), model);
    refused(&run("hf:o/none"), &["hf:o/none", "404", "check the name"]);
    refused(&run("hf:o/r:none.gguf"), &["none.gguf", "hf:o/r", "404", "check the name"]);
    for name in ["hf:", "hf:r", "hf:o/", "hf:o/r/x", "hf:o/r:", "hf:../r", "hf:o/r:../m.gguf", "hf:o/r:/etc/passwd"] {
        let requests = hub.log().len();
        refused(&run(name), &[name, "hf:owner/repo"]);
        assert_eq!(hub.log().len(), requests);
    }

    let several = BTreeMap::from(["a.gguf", "b.gguf"].map(|name| (name.to_owned(), vec![0])));
    let hub = Hub::start(Shelf::of(several));
    refused(&hub.generate(home.path(), "hf:o/r"), &["several", "a.gguf, b.gguf"]);
    let hub = Hub::start(Shelf::of(BTreeMap::from([("README.md".to_owned(), vec![0])])));
    refused(&hub.generate(home.path(), "hf:o/r"), &["neither GGUF nor safetensors"]);
}

#[test]
fn a_download_that_breaks_off_is_an_error_and_is_resumed() {
    let home = tempfile::tempdir().unwrap();
    let hub = Hub::start(Shelf { cut: true, ..Shelf::of(small()) });
    refused(&hub.generate(home.path(), "hf:o/r:m.gguf"), &["fetch m.gguf"]);
    drop(hub);
    let hub = Hub::start(Shelf::of(small()));
    let run = last_line(stdout_of(&hub.generate(home.path(), "hf:o/r:m.gguf")));
    assert_eq!(run["logits_xxh3"], local(&MODELS.small)["logits_xxh3"]);
    let half = small()["m.gguf"].len() / 2;
    assert!(hub.log().iter().any(|line| line.starts_with(&format!("/store/m.gguf {half}- "))), "{:?}", hub.log());
}

#[test]
fn an_interrupt_ends_a_download_at_once() {
    let home = tempfile::tempdir().unwrap();
    let ((begun, has_begun), (end, never)) = (channel(), channel());
    let hub = Hub::start(Shelf { stall: Some((begun, Mutex::new(never))), ..Shelf::of(small()) });
    let mut command = hub.command(home.path(), "hf:o/r:m.gguf");
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    has_begun.recv_timeout(PATIENCE).unwrap();
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    drop(end);
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert!(output.stdout.is_empty());
    assert!(String::from_utf8_lossy(&output.stderr).contains("interrupted"));
}
