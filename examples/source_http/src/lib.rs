//! A model on an HTTP server, read by range requests: no copy of the file on this machine.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use outcore::store::PageSource;
use outcore::{Error, ErrorKind, Result};
use ureq::http::{HeaderMap, HeaderValue, StatusCode};

/// How long one request may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// One file on a server that understands ranges and says by an ETag or a time of modification which bytes it has. Once
/// it was seen to have other bytes than at open, reads by the runtime fail: open it again.
#[derive(Debug)]
pub struct HttpSource {
    url: String,
    len: u64,
    /// The version at open. Bytes of no other are taken.
    version: Version,
    /// Whether another version was seen. It stays true: a slow answer, or one of another server, may be older than one
    /// that has come.
    changed: AtomicBool,
    agent: ureq::Agent,
}

impl HttpSource {
    /// Asks the server for the file's length and version.
    ///
    /// # Errors
    /// [`Io`](ErrorKind::Io) if the server does not answer, or refuses; [`Unsupported`](ErrorKind::Unsupported) if it
    /// does not say how long the file is, or which version.
    pub fn open(url: &str) -> Result<Self> {
        let agent: ureq::Agent = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).build().into();
        let answer = agent.head(url).call().map_err(|cause| {
            Error::new(ErrorKind::Io, format!("ask for {url}")).caused_by(cause).remedy("check the URL and the server")
        })?;
        let lacks = |what: &str| {
            Error::new(ErrorKind::Unsupported, format!("the server does not say {what} {url} is"))
                .remedy("use a server that serves files with Content-Length and ETag")
        };
        let len = answer.headers().get("content-length").and_then(|len| len.to_str().ok()?.parse().ok());
        let len = len.ok_or_else(|| lacks("how long"))?;
        let version = Version::of(answer.headers()).ok_or_else(|| lacks("which version"))?;
        Ok(Self { url: url.to_owned(), len, version, changed: AtomicBool::new(false), agent })
    }

    /// Another version than the one at open was seen.
    fn changed(&self) -> io::Error {
        self.changed.store(true, Ordering::Release);
        io::Error::other("the server has another version of the file by now: open it again")
    }
}

/// What tells one version of a file from another.
#[derive(Debug, PartialEq, Eq)]
struct Version {
    /// The header that says it.
    header: &'static str,
    value: HeaderValue,
}

impl Version {
    fn of(headers: &HeaderMap) -> Option<Self> {
        ["etag", "last-modified"]
            .into_iter()
            .find_map(|header| Some(Self { header, value: headers.get(header)?.clone() }))
    }

    /// Whether a server can be asked for this version alone: a weak ETag stands for several.
    fn is_strong(&self) -> bool {
        self.header == "etag" && !self.value.as_bytes().starts_with(b"W/")
    }

    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.value.as_bytes().hash(&mut hasher);
        hasher.finish()
    }
}

/// How many bytes a `Content-Range` says that there are from `offset` on. `None` if it begins elsewhere, or goes beyond
/// `end`.
fn length_of(range: &HeaderValue, offset: u64, end: u64) -> Option<u64> {
    let (range, _whole) = range.to_str().ok()?.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    (first == offset && last >= first && last < end).then(|| last - first + 1)
}

impl PageSource for HttpSource {
    fn name(&self) -> String {
        self.url.clone()
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn identity(&self) -> u64 {
        self.version.hash() ^ u64::from(self.changed.load(Ordering::Acquire))
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let end = offset + bytes.len() as u64;
        let range = format!("bytes={offset}-{}", end - 1);
        let mut request = self.agent.get(&self.url).header("Range", &range);
        if self.version.is_strong() {
            request = request.header("If-Match", self.version.value.clone());
        }
        let mut answer = match request.call() {
            Ok(answer) => answer,
            Err(ureq::Error::StatusCode(412)) => return Err(self.changed()),
            Err(cause) => return Err(io::Error::other(cause)),
        };
        // Not every server looks at `If-Match`, and an answer may come from a cache.
        match answer.headers().get(self.version.header) {
            Some(value) if *value == self.version.value => {}
            Some(_) => return Err(self.changed()),
            None => return Err(io::Error::other("the server does not say of which version its answer is")),
        }
        if answer.status() != StatusCode::PARTIAL_CONTENT {
            return Err(io::Error::other(format!("the server answers {range} by {}", answer.status())));
        }
        let sent = answer.headers().get("content-range");
        let len = sent
            .and_then(|sent| length_of(sent, offset, end))
            .ok_or_else(|| io::Error::other(format!("the server answers {range} by another range: {sent:?}")))?;
        let bytes = bytes.get_mut(..len as usize).unwrap_or_default();
        // A short answer is one call's progress; a connection that breaks before any byte is a failure.
        let mut body = answer.body_mut().as_reader();
        let mut came = 0;
        while let Some(rest) = bytes.get_mut(came..).filter(|rest| !rest.is_empty()) {
            match body.read(rest) {
                Ok(0) => break,
                Ok(more) => came += more,
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(_) if came > 0 => break,
                Err(cause) => return Err(io::Error::other(cause)),
            }
        }
        Ok(came)
    }
}
