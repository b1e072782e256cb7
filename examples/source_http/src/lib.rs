//! A model on an HTTP server, read by range requests: no copy of the file on this machine.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use outcore::store::PageSource;
use outcore::{Error, ErrorKind, Result};
use ureq::http::{HeaderMap, StatusCode};

/// How long one request may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// One file on a server that understands ranges and says by an ETag or a time of modification which bytes it has.
#[derive(Debug)]
pub struct HttpSource {
    url: String,
    len: u64,
    /// The version that the last answer was of.
    identity: AtomicU64,
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
        let identity = version(answer.headers()).ok_or_else(|| lacks("which version"))?;
        Ok(Self { url: url.to_owned(), len, identity: AtomicU64::new(identity), agent })
    }
}

/// What tells one version of a file from another.
fn version(headers: &HeaderMap) -> Option<u64> {
    let named = headers.get("etag").or_else(|| headers.get("last-modified"))?;
    let mut hasher = DefaultHasher::new();
    named.as_bytes().hash(&mut hasher);
    Some(hasher.finish())
}

impl PageSource for HttpSource {
    fn name(&self) -> String {
        self.url.clone()
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn identity(&self) -> u64 {
        self.identity.load(Ordering::Acquire)
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let range = format!("bytes={offset}-{}", offset + bytes.len() as u64 - 1);
        let mut answer = self.agent.get(&self.url).header("Range", &range).call().map_err(io::Error::other)?;
        if answer.status() != StatusCode::PARTIAL_CONTENT {
            return Err(io::Error::other(format!("the server answers {range} by {}", answer.status())));
        }
        // If the version has changed, the runtime sees that in `identity`, and fails the read.
        self.identity.store(version(answer.headers()).unwrap_or(0), Ordering::Release);
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
