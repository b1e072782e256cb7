//! The promise: a model on a server is a model: its bytes, its errors, and never bytes of two versions.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::error::Error;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

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
    /// Pays no heed to the version that is asked for.
    Heedless,
    /// Sends the bytes that follow those that were asked for, and says so.
    OtherRange,
    /// Does not say which range it sends.
    NoRange,
    /// Does not say which version it sends.
    NoVersion,
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
    let (mut range, mut wanted) = (None, None);
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some((first, last)) = line.strip_prefix("range: bytes=").and_then(|range| range.split_once('-')) {
            range = Some((first.parse::<usize>().unwrap(), last.parse::<usize>().unwrap()));
        }
        wanted = wanted.or(line.strip_prefix("if-match: ").map(str::to_owned));
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
    if mood != Mood::Heedless && wanted.is_some_and(|wanted| wanted != etag) {
        write!(connection, "HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n\r\n")?;
        return Ok(true);
    }
    let by = if mood == Mood::OtherRange { (last - first + 1).min(bytes.len() - 1 - last) } else { 0 };
    let (first, last) = (first + by, last + by);
    let part = &bytes[first..=last];
    write!(connection, "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\n", part.len())?;
    if mood != Mood::NoVersion {
        write!(connection, "ETag: {etag}\r\n")?;
    }
    if mood != Mood::NoRange {
        write!(connection, "Content-Range: bytes {first}-{last}/{}\r\n", bytes.len())?;
    }
    write!(connection, "\r\n")?;
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
    for mood in [Mood::Well, Mood::Heedless] {
        replaced(mood);
    }
}

fn replaced(mood: Mood) {
    let server = Server::start(model(0));
    let runtime = runtime("auto");
    let model_one = runtime.open_source(Arc::new(HttpSource::open(&server.url).unwrap())).unwrap();
    let tensor = model_one.tensor("w").unwrap();
    assert_eq!(row(&runtime, &tensor, 0).unwrap(), 0);
    server.change(|state| *state = (model(100), "\"two\"", mood));
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

/// The bug: the version of the answer that came last was the source's, so an old answer hid that a new one had come.
#[test]
fn regression_an_answer_of_the_old_version_does_not_hide_that_a_new_one_came() {
    for mood in [Mood::Well, Mood::Heedless] {
        let server = Server::start(model(0));
        let source = HttpSource::open(&server.url).unwrap();
        let (identity, mut bytes) = (source.identity(), [0; 100]);
        let read = |bytes: &mut [u8]| source.read_at(ROW, bytes).map_err(|error| error.to_string());
        assert_eq!(read(&mut bytes), Ok(100));
        let before = bytes;
        server.change(|state| *state = (model(100), "\"two\"", mood));
        assert!(read(&mut bytes).unwrap_err().contains("another version"));
        assert_eq!(bytes, before, "none of its bytes are taken");
        let changed = source.identity();
        assert_ne!(changed, identity);
        server.change(|state| *state = (model(0), "\"one\"", mood));
        let _ = read(&mut bytes);
        assert_eq!(source.identity(), changed);
    }
}

/// The bug: whatever a 206 brought was taken for the bytes that were asked for.
#[test]
fn regression_an_answer_of_another_range_is_an_error() {
    for (mood, says) in
        [(Mood::OtherRange, "another range"), (Mood::NoRange, "another range"), (Mood::NoVersion, "which version")]
    {
        let server = Server::start(model(0));
        let runtime = runtime("auto");
        let model = runtime.open_source(Arc::new(HttpSource::open(&server.url).unwrap())).unwrap();
        let tensor = model.tensor("w").unwrap();
        server.change(|state| state.2 = mood);
        let error = row(&runtime, &tensor, 20).unwrap_err();
        assert!(error.kind() == ErrorKind::Io && error.to_string().contains(says), "{error}");
        server.change(|state| state.2 = Mood::Well);
        assert_eq!(row(&runtime, &tensor, 20).unwrap(), 20);
        drop((model, tensor));
        runtime.close().unwrap();
    }
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
    calls: AtomicU64,
    /// Whether a read hangs.
    changed: (Mutex<bool>, Condvar),
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
/// It fails with the number that the C library beside it returned.
const NUMBER_IS_NEGATIVE: u64 = 11;
const NUMBER_IS_ZERO: u64 = 12;
const NUMBER_IS_LEAST: u64 = 13;
const BAD_ADDRESS: u64 = 14;
const TIMED_OUT: u64 = 15;
/// Does not come back until it may go on.
const HANGS: u64 = 16;

impl Rude {
    fn new(how: u64) -> Arc<Self> {
        Arc::new(Self {
            model: model(0),
            how: AtomicU64::new(how),
            calls: AtomicU64::new(0),
            changed: Default::default(),
        })
    }
    fn how(&self) -> u64 {
        self.how.load(Ordering::Relaxed)
    }
    fn becomes(&self, how: u64) {
        self.how.store(how, Ordering::Relaxed);
    }
    fn hangs(&self) {
        let mut hangs = self.changed.0.lock().unwrap();
        *hangs = true;
        self.changed.1.notify_all();
        drop(self.changed.1.wait_while(hangs, |hangs| *hangs).unwrap());
    }
    fn wait_until_it_hangs(&self) {
        drop(self.changed.1.wait_while(self.changed.0.lock().unwrap(), |hangs| !*hangs).unwrap());
    }
    fn goes_on(&self) {
        *self.changed.0.lock().unwrap() = false;
        self.changed.1.notify_all();
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
        self.calls.fetch_add(1, Ordering::Relaxed);
        match self.how() {
            NOTHING_COMES => return Ok(0),
            ALWAYS_INTERRUPTED => return Err(io::ErrorKind::Interrupted.into()),
            NO_DISK => return Err(io::Error::from_raw_os_error(5)),
            NUMBER_IS_NEGATIVE => return Err(io::Error::from_raw_os_error(-5)),
            NUMBER_IS_ZERO => return Err(io::Error::from_raw_os_error(0)),
            NUMBER_IS_LEAST => return Err(io::Error::from_raw_os_error(i32::MIN)),
            BAD_ADDRESS => return Err(io::Error::from_raw_os_error(14)),
            TIMED_OUT => return Err(io::Error::from_raw_os_error(11)),
            HANGS => self.hangs(),
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

/// The bug: the number of any error of a source was turned round. So -5 became five bytes that had come, 0 none, EFAULT
/// a bug of the runtime's, and EAGAIN, which a socket's timeout is, was tried ten thousand times.
#[test]
fn regression_an_error_of_a_source_is_an_error_whatever_its_number() {
    let runtime = runtime("auto");
    let rude = Rude::new(0);
    let model = runtime.open_source(rude.clone()).unwrap();
    let tensor = model.tensor("w").unwrap();
    for (n, how) in (20..).zip([NUMBER_IS_NEGATIVE, NUMBER_IS_ZERO, NUMBER_IS_LEAST, BAD_ADDRESS, TIMED_OUT]) {
        rude.becomes(how);
        let before = rude.calls.load(Ordering::Relaxed);
        let error = row(&runtime, &tensor, n).unwrap_err();
        let calls = rude.calls.load(Ordering::Relaxed) - before;
        assert!(calls <= 2, "{how}: a row is in two pages, which were asked for {calls} times");
        assert_eq!(error.kind(), ErrorKind::Io, "{how}: {error}");
        assert!(error.advice().is_some_and(|advice| advice.contains("see what the source says")), "{how}: {error}");
        rude.becomes(0);
        assert_eq!(u64::from(row(&runtime, &tensor, n).unwrap()), n);
    }
    drop((model, tensor));
    runtime.close().unwrap();
}

/// The bug: who closed a runtime while a source hung was told to look at the disk.
#[test]
fn regression_a_source_that_hangs_is_named_by_close() {
    let page = PageSize::new(Bytes::new(ROW)).unwrap();
    let builder = Runtime::builder().page_size(page).device_budget(Bytes::new(8 * ROW));
    let runtime = builder.close_within(Duration::from_millis(1)).open().unwrap();
    let rude = Rude::new(0);
    let model = runtime.open_source(rude.clone()).unwrap();
    rude.becomes(HANGS);
    runtime.prefetch(&model.tensor("w").unwrap().rows(20..21).unwrap());
    rude.wait_until_it_hangs();
    let error = runtime.close().unwrap_err();
    let advice = error.advice().unwrap_or_default();
    assert!(error.kind() == ErrorKind::Io && advice.contains("see what the source says"), "{error}");
    rude.goes_on();
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
