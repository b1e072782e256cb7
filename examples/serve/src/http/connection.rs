//! Connections: how many, how long a client may take, and how they end.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::HeaderValue;
use axum::http::header::HOST;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tower_service::Service;

use super::App;

/// The longest head of a request, in bytes, and the most headers.
const HEAD_BYTES: usize = 32 << 10;
const HEADERS_MOST: usize = 64;
/// After so long the system gives up a connection whose client takes nothing, in milliseconds.
const STUCK_MS: u32 = 30_000;
/// How long connections may take to end when the server stops.
const END_WITHIN: Duration = Duration::from_secs(5);
/// How long it waits where no connection can be accepted: descriptors come back when others end.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Answers on `listener` until `stop` is done, and then lets connections end.
pub async fn serve(app: Arc<App>, router: Router, listener: TcpListener, stop: impl Future<Output = ()>) {
    let open = Arc::new(Semaphore::new(app.connections));
    let graceful = GracefulShutdown::new();
    let mut stop = pin!(stop);
    loop {
        let accepted = async {
            // Beyond the most, clients wait in the system's queue.
            let permit = open.clone().acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, stream) = tokio::select! {
            accepted = accepted => accepted,
            () = &mut stop => break,
        };
        let (Ok(permit), stream) = (permit, stream) else { break };
        let stream = match stream {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(AGAIN_AFTER).await;
                continue;
            }
        };
        prepare(&stream);
        let stream = Arc::new(stream);
        let counted = app.opened.metrics.connection();
        let (router, client) = (router.clone(), Client(stream.clone()));
        let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(client.clone());
            // A host in the request's line counts, and not the header (RFC 9112, 3.2.2).
            if let Some(authority) = request.uri().authority() {
                let host = HeaderValue::from_str(authority.as_str());
                request.headers_mut().insert(HOST, host.unwrap_or(HeaderValue::from_static("")));
            }
            router.clone().call(request.map(axum::body::Body::new))
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(app.within.head)
            .max_buf_size(HEAD_BYTES)
            .max_headers(HEADERS_MOST)
            .serve_connection(TokioIo::new(Shared(stream)), service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection was broken off");
            }
            drop((permit, counted));
        });
    }
    drop(listener);
    if tokio::time::timeout(END_WITHIN, graceful.shutdown()).await.is_err() {
        tracing::warn!("connections were broken off: they did not end within {} s", END_WITHIN.as_secs());
    }
}

/// The other end of a request's connection.
#[derive(Clone, Debug)]
pub struct Client(Arc<TcpStream>);

impl Client {
    /// Waits until the client has closed its half of the connection. Bytes that nobody has read yet may lie before
    /// that: while an answer is written, hyper looks no further than these.
    pub async fn gone(&self) {
        // Nobody has asked to be told of urgent bytes, so what makes this ready is the end.
        while self.0.ready(Interest::PRIORITY).await.is_ok_and(|ready| !ready.is_read_closed()) {
            tokio::task::yield_now().await;
        }
    }
}

/// A stream that is also looked at from elsewhere.
struct Shared(Arc<TcpStream>);

impl AsyncRead for Shared {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read(into.initialize_unfilled()) {
                Ok(count) => {
                    into.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl Shared {
    fn poll_try(
        &self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match write(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
        }
    }
}

impl AsyncWrite for Shared {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_try(cx, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_try(cx, |stream| stream.try_write_vectored(pieces))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(rustix::net::shutdown(&self.0, rustix::net::Shutdown::Write)?))
    }
}

fn prepare(stream: &TcpStream) {
    // Pieces are small, and somebody reads along.
    let set = stream.set_nodelay(true).and_then(|()| Ok(sockopt::set_tcp_user_timeout(stream, STUCK_MS)?));
    if let Err(error) = set {
        tracing::debug!(%error, "an option of a connection could not be set");
    }
}
