//! The promise: a model on a server is a model: its bytes, its errors, and never bytes of two versions.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::error::Error;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use outcore::store::PageSource;
use outcore::{Bytes, ErrorKind, PageSize, Runtime};
use outcore_source_http::HttpSource;

const ROW: u64 = 64 << 10;
const ROWS: u64 = 48;

/// What the server does with requests for ranges.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mood {
    Well,
    /// Sends half of what was asked for, and closes.
    Short,
    /// 503.
    Refuses,
}

struct Server {
    url: String,
    state: Arc<Mutex<(Vec<u8>, &'static str, Mood)>>,
    asked: Arc<AtomicU64>,
}

/// A model of one tensor, each row with a byte of its own.
fn model(shift: u8) -> Vec<u8> {
    let header = format!("{{\"w\":{{\"dtype\":\"U8\",\"shape\":[{ROWS},{ROW}],\"data_offsets\":[0,{}]}}}}", ROWS * ROW);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..ROWS).flat_map(|row| vec![row as u8 + shift; ROW as usize]));
    bytes
}

impl Server {
    fn start(bytes: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/model.safetensors", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new((bytes, "\"one\"", Mood::Well)));
        let asked = Arc::new(AtomicU64::new(0));
        let server = Self { url, state: state.clone(), asked: asked.clone() };
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let (state, asked) = (state.clone(), asked.clone());
                thread::spawn(move || while let Ok(true) = answer(&connection, &state, &asked) {});
            }
        });
        server
    }

    fn change(&self, change: impl FnOnce(&mut (Vec<u8>, &'static str, Mood))) {
        change(&mut self.state.lock().unwrap());
    }
}

/// Answers one request. False if the connection ends.
fn answer(connection: &TcpStream, state: &Mutex<(Vec<u8>, &'static str, Mood)>, asked: &AtomicU64) -> io::Result<bool> {
    let mut lines = BufReader::new(connection).lines();
    let Some(request) = lines.next().transpose()? else { return Ok(false) };
    let mut range = None;
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some((first, last)) = line.strip_prefix("range: bytes=").and_then(|range| range.split_once('-')) {
            range = Some((first.parse::<usize>().unwrap(), last.parse::<usize>().unwrap()));
        }
    }
    let (bytes, etag, mood) = state.lock().unwrap().clone();
    let mut connection = connection;
    let Some((first, last)) = range.filter(|_| request.starts_with("GET")) else {
        write!(connection, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nETag: {etag}\r\n\r\n", bytes.len())?;
        return Ok(true);
    };
    asked.fetch_add(1, Ordering::Relaxed);
    if mood == Mood::Refuses {
        write!(connection, "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")?;
        return Ok(true);
    }
    let part = &bytes[first..=last];
    write!(connection, "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nETag: {etag}\r\n\r\n", part.len())?;
    if mood == Mood::Short && part.len() > 1 {
        connection.write_all(&part[..part.len() / 2])?;
        return Ok(false);
    }
    connection.write_all(part)?;
    Ok(true)
}

fn runtime(io: &str) -> Runtime {
    let page = PageSize::new(Bytes::new(ROW)).unwrap();
    let builder = Runtime::builder().page_size(page).device_budget(Bytes::new(8 * ROW)).io(io.parse().unwrap());
    builder.scratch_dir(env!("CARGO_TARGET_TMPDIR")).open().unwrap()
}

/// Reads a row, whose bytes must all be equal.
fn row(runtime: &Runtime, tensor: &outcore::Tensor, row: u64) -> outcore::Result<u8> {
    let guard = runtime.pin(&tensor.rows(row..row + 1).unwrap()).wait()?;
    let first = guard[0];
    assert!(guard.iter().all(|byte| *byte == first), "row {row} is of several versions");
    Ok(first)
}

#[test]
fn a_model_on_a_server_streams_like_a_file() {
    let server = Server::start(model(0));
    for io in ["auto", "threads", "buffered"] {
        let runtime = runtime(io);
        let model = runtime.open_source(Arc::new(HttpSource::open(&server.url).unwrap())).unwrap();
        let tensor = model.tensor("w").unwrap();
        let passes = |count: u64| {
            for n in 0..count * ROWS {
                assert_eq!(row(&runtime, &tensor, n % ROWS).unwrap(), (n % ROWS) as u8);
            }
        };
        // The order is recognised, and followed.
        passes(3);
        assert!(runtime.stats().pager.prefetched > 0);
        thread::scope(|scope| [(); 2].map(|()| drop(scope.spawn(|| passes(2)))));
        let stats = runtime.stats();
        assert!(stats.traffic.peak_device <= Bytes::new(8 * ROW), "{stats:?}");
        drop((model, tensor));
        runtime.close().unwrap();
    }
    // The passes had room for 8 of 48 rows, so most pages were fetched again.
    assert!(server.asked.load(Ordering::Relaxed) > 3 * ROWS);
}

#[test]
fn answers_that_stop_half_way_are_asked_for_again() {
    let server = Server::start(model(0));
    let runtime = runtime("auto");
    let model = runtime.open_source(Arc::new(HttpSource::open(&server.url).unwrap())).unwrap();
    let tensor = model.tensor("w").unwrap();
    server.change(|state| state.2 = Mood::Short);
    assert_eq!(row(&runtime, &tensor, 20).unwrap(), 20);
    drop((model, tensor));
    runtime.close().unwrap();
}

#[test]
fn a_server_that_refuses_is_an_error_and_may_recover() {
    let server = Server::start(model(0));
    let runtime = runtime("auto");
    let model = runtime.open_source(Arc::new(HttpSource::open(&server.url).unwrap())).unwrap();
    let tensor = model.tensor("w").unwrap();
    server.change(|state| state.2 = Mood::Refuses);
    let error = row(&runtime, &tensor, 30).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains(&server.url) && error.to_string().contains("503"), "{error}");
    server.change(|state| state.2 = Mood::Well);
    assert_eq!(row(&runtime, &tensor, 30).unwrap(), 30);
    drop((model, tensor));
    runtime.close().unwrap();
}

#[test]
fn a_file_that_is_replaced_on_the_server_is_noticed_at_the_next_read() {
    let server = Server::start(model(0));
    let runtime = runtime("auto");
    let model_one = runtime.open_source(Arc::new(HttpSource::open(&server.url).unwrap())).unwrap();
    let tensor = model_one.tensor("w").unwrap();
    assert_eq!(row(&runtime, &tensor, 0).unwrap(), 0);
    server.change(|state| (state.0, state.1) = (model(100), "\"two\""));
    let error = (10..40).find_map(|at| row(&runtime, &tensor, at).err()).unwrap();
    assert_eq!(error.kind(), ErrorKind::ModelChanged, "{error}");
    assert!(error.to_string().contains(&server.url), "{error}");
    drop((model_one, tensor));
    // The file that is opened again is the new one.
    let model_two = runtime.open_source(Arc::new(HttpSource::open(&server.url).unwrap())).unwrap();
    let tensor = model_two.tensor("w").unwrap();
    assert_eq!(row(&runtime, &tensor, 10).unwrap(), 110);
    drop((model_two, tensor));
    runtime.close().unwrap();
}

#[test]
fn what_is_no_model_is_refused() {
    let server = Server::start(b"<html>not found</html>".to_vec());
    let runtime = runtime("auto");
    let error = runtime.open_source(Arc::new(HttpSource::open(&server.url).unwrap())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Format, "{error}");
    let gone = HttpSource::open("http://127.0.0.1:9/model.gguf").unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::Io, "{gone}");
    runtime.close().unwrap();
}

/// Misbehaves in the way of its number.
#[derive(Debug)]
struct Rude {
    model: Vec<u8>,
    how: AtomicU64,
}

const READ_PANICS: u64 = 1;
const NOTHING_COMES: u64 = 2;
/// Says that more came than there was room for.
const TOO_MUCH_COMES: u64 = 3;
const IDENTITY_PANICS: u64 = 4;
const NAME_PANICS: u64 = 5;
const LENGTH_PANICS: u64 = 6;
const ALWAYS_INTERRUPTED: u64 = 7;
/// Says that as many bytes came as a number can say.
const ENDLESSLY_MUCH_COMES: u64 = 8;
const NO_DISK: u64 = 9;
const DROP_PANICS: u64 = 10;

impl Rude {
    fn new(how: u64) -> Arc<Self> {
        Arc::new(Self { model: model(0), how: AtomicU64::new(how) })
    }
    fn how(&self) -> u64 {
        self.how.load(Ordering::Relaxed)
    }
    fn becomes(&self, how: u64) {
        self.how.store(how, Ordering::Relaxed);
    }
    fn panics_if(&self, how: u64) {
        assert!(self.how() != how, "no manners");
    }
}

impl Drop for Rude {
    fn drop(&mut self) {
        self.panics_if(DROP_PANICS);
    }
}

impl PageSource for Rude {
    fn name(&self) -> String {
        self.panics_if(NAME_PANICS);
        "a rude source".into()
    }
    fn len(&self) -> u64 {
        self.panics_if(LENGTH_PANICS);
        self.model.len() as u64
    }
    fn identity(&self) -> u64 {
        self.panics_if(IDENTITY_PANICS);
        7
    }
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        self.panics_if(READ_PANICS);
        match self.how() {
            NOTHING_COMES => return Ok(0),
            ALWAYS_INTERRUPTED => return Err(io::ErrorKind::Interrupted.into()),
            NO_DISK => return Err(io::Error::from_raw_os_error(5)),
            _ => {}
        }
        bytes.copy_from_slice(&self.model[offset as usize..][..bytes.len()]);
        Ok(match self.how() {
            TOO_MUCH_COMES => bytes.len() + 10_000,
            ENDLESSLY_MUCH_COMES => usize::MAX,
            _ => bytes.len(),
        })
    }
}

/// What a source does, and what the error of the read says.
const MOODS: [(u64, &str); 6] = [
    (READ_PANICS, "no manners"),
    (NOTHING_COMES, "a rude source gave no bytes at offset"),
    (IDENTITY_PANICS, "no manners"),
    (ALWAYS_INTERRUPTED, "a rude source"),
    (NO_DISK, "see what the source says"),
    (NAME_PANICS, ""),
];

#[test]
fn a_source_that_misbehaves_costs_its_own_reads_only() {
    let runtime = runtime("auto");
    let rude = Rude::new(0);
    let model = runtime.open_source(rude.clone()).unwrap();
    let tensor = model.tensor("w").unwrap();
    for (n, (how, says)) in (0..).zip(MOODS) {
        rude.becomes(how);
        match row(&runtime, &tensor, 40 + n) {
            // It was asked for its name before.
            Ok(byte) => assert!(how == NAME_PANICS && u64::from(byte) == 40 + n),
            Err(error) => {
                let (text, advice) = (error.to_string(), error.advice().unwrap_or_default().to_owned());
                assert!(
                    format!("{text} {advice}").contains(says) && text.contains("a rude source"),
                    "{text}: {advice}"
                );
            }
        }
        rude.becomes(0);
        assert_eq!(u64::from(row(&runtime, &tensor, 40 + n).unwrap()), 40 + n, "{how}: it is well again");
    }
    for how in [TOO_MUCH_COMES, ENDLESSLY_MUCH_COMES, LENGTH_PANICS] {
        rude.becomes(how);
        assert_eq!(row(&runtime, &tensor, 20 + how).unwrap(), 20 + how as u8);
    }
    rude.becomes(DROP_PANICS);
    // The runtime has the last handle.
    drop(rude);
    drop((model, tensor));
    runtime.close().unwrap();
}

#[test]
fn regression_a_source_that_misbehaves_while_it_is_opened_is_an_error() {
    let runtime = runtime("auto");
    for (how, says) in [
        (NAME_PANICS, "ask for the name of"),
        (LENGTH_PANICS, "ask for the length of"),
        (IDENTITY_PANICS, "ask for the identity of a rude source"),
        (READ_PANICS, "read the header"),
        (NOTHING_COMES, "a rude source gave no bytes at offset 0"),
        (ALWAYS_INTERRUPTED, "read the header"),
        (NO_DISK, "read the header"),
    ] {
        let error = runtime.open_source(Rude::new(how)).unwrap_err();
        let source = error.source().map(ToString::to_string).unwrap_or_default();
        assert!(error.to_string().contains(says), "{how}: {error}");
        assert!(how == NOTHING_COMES || !source.is_empty(), "{how}: {error}");
    }
    for how in [TOO_MUCH_COMES, ENDLESSLY_MUCH_COMES] {
        let model = runtime.open_source(Rude::new(how)).unwrap();
        assert_eq!(row(&runtime, &model.tensor("w").unwrap(), 30).unwrap(), 30);
    }
    runtime.close().unwrap();
}
