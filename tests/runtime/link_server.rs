//! The promise: the server of `examples/link_server.rs` answers tenants side by side with the right sums, lets go of
//! what a client that has gone was waiting for, and refuses what is beyond a tenant's quota while it serves the others.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::thread;

use harness::{until, watched};
use outcore::Bytes;
use outcore_testkit::harness;
use tokio::io::{AsyncReadExt, DuplexStream};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use example::{ROWS, Server};

#[path = "../../examples/link_server.rs"]
#[expect(dead_code, reason = "its main is not called")]
mod example;

/// A server that runs on a port of its own.
struct Running {
    server: Arc<Server>,
    at: SocketAddr,
    tokio: tokio::runtime::Runtime,
    serves: JoinHandle<()>,
    /// It ends when this is dropped.
    end: DuplexStream,
}

impl Running {
    fn start() -> Self {
        let server = Arc::new(Server::open().unwrap());
        let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = tokio.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let at = listener.local_addr().unwrap();
        let (end, mut ends) = tokio::io::duplex(1);
        let serve = example::serve(server.clone(), listener, async move { ends.read_u8().await });
        Self { server, at, serves: tokio.spawn(serve), tokio, end }
    }

    /// A client that has sent a request.
    fn client(&self, target: &str, token: &str) -> TcpStream {
        let mut client = TcpStream::connect(self.at).unwrap();
        write!(client, "GET {target} HTTP/1.1\r\nHost: here\r\nauthorization: Bearer {token}\r\n\r\n").unwrap();
        client
    }

    fn ask(&self, target: &str, token: &str) -> String {
        answer(self.client(target, token))
    }

    fn client_of(&self, rows: Range<u64>, token: &str) -> TcpStream {
        self.client(&format!("/sum?rows={}..{}", rows.start, rows.end), token)
    }

    /// A number of the server's metrics.
    fn metric(&self, name: &str) -> u64 {
        let text = self.ask("/metrics", "");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap();
        line.parse().unwrap()
    }

    /// Waits until each of these is so.
    fn until(&self, metrics: &[(&str, u64)]) {
        until(&format!("{metrics:?}"), || metrics.iter().all(|(name, value)| self.metric(name) == *value));
    }

    fn end(self) {
        drop(self.end);
        self.tokio.block_on(self.serves).unwrap();
        let server = Arc::into_inner(self.server).ok_or("a client is left").unwrap();
        assert_eq!((server.pool.stats().used, server.pool.stats().active), (0, 0));
        server.pool.runtime().clone().close().unwrap();
    }
}

fn answer(mut client: TcpStream) -> String {
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    answer
}

fn check(rows: Range<u64>, answer: &str) {
    let (first, width) = (rows.start, 8192);
    let sum: u64 = rows.clone().map(|row| first * row * width).sum();
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert_eq!(text.lines().next().unwrap(), sum.to_string(), "{rows:?}: {answer}");
}

#[test]
fn two_tenants_get_their_sums_at_the_same_time() {
    watched("two_tenants_get_their_sums_at_the_same_time", || {
        let running = Running::start();
        thread::scope(|threads| {
            let ask = |token, first: u64| {
                for (first, end) in [(first, first + 40), (first, ROWS), (first + 3, first + 90), (first, first + 41)] {
                    check(first..end, &answer(running.client_of(first..end, token)));
                }
            };
            for (token, first) in [("token-a", 1), ("token-a", 500), ("token-b", 1), ("token-b", 900)] {
                threads.spawn(move || ask(token, first));
            }
        });
        assert!(running.metric("outcore_disk_read_bytes_total") > 0, "it all fits");
        assert!(running.metric("outcore_device_bytes") <= running.metric("outcore_device_budget_bytes"));
        // What a tenant has had computed is there for it, and for it alone.
        let again = running.ask("/sum?rows=500..1024", "token-a");
        assert!(again.ends_with("512 of 524 rows were known\n"), "{again}");
        let others = running.ask("/sum?rows=500..1024", "token-b");
        assert!(others.ends_with("\n0 of 524 rows were known\n"), "{others}");
        for (target, token, status) in [
            ("/sum?rows=1..2", "token-c", "401 Unauthorized\r\nWWW-Authenticate: Bearer\r\n"),
            ("/sum?rows=2..2", "token-a", "404 Not Found\r\n"),
            ("/sum?rows=1..1025", "token-a", "404 Not Found\r\n"),
            ("/sum?rows=-1..9", "token-a", "404 Not Found\r\n"),
            ("/", "token-a", "404 Not Found\r\n"),
        ] {
            let answer = running.ask(target, token);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{target}: {answer}");
        }
        running.end();
    });
}

#[test]
fn requests_do_not_wait_in_a_circle_where_there_is_hardly_room() {
    watched("requests_do_not_wait_in_a_circle_where_there_is_hardly_room", || {
        let running = Running::start();
        // Four pages, where each of the requests needs two at a time.
        running.server.pool.runtime().set_device_budget(Bytes::kib(256)).unwrap();
        let clients: Vec<_> = (0..24).map(|n| 1 + 40 * n).collect();
        let clients = clients.into_iter().zip(["token-a", "token-b"].into_iter().cycle());
        let clients: Vec<_> =
            clients.map(|(first, token)| (first, running.client_of(first..first + 20, token))).collect();
        for (first, client) in clients {
            check(first..first + 20, &answer(client));
        }
        running.end();
    });
}

#[test]
fn a_client_that_goes_leaves_nothing_behind() {
    watched("a_client_that_goes_leaves_nothing_behind", || {
        let running = Running::start();
        let row = running.server.table.rows(50..51).unwrap();
        let held = running.server.pool.runtime().pin(&row).write().wait().unwrap();
        for how in [None, Some(Shutdown::Both), Some(Shutdown::Write)] {
            let client = running.client_of(7..1000, "token-a");
            // It has computed 43 rows, and waits for the next one.
            running.until(&[("outcore_waiting", 1), ("outcore_kv_used", 3), ("outcore_kv_active", 63)]);
            match how {
                None => drop(client),
                Some(how) => client.shutdown(how).unwrap(),
            }
            running.until(&[("outcore_waiting", 0), ("outcore_kv_used", 0), ("outcore_kv_active", 0)]);
        }
        // Nor does one that waits for a permit.
        let clients = [7, 8].map(|first| {
            let client = running.client_of(first..1000, "token-a");
            running.until(&[("outcore_kv_active", 63), ("outcore_kv_waiting", u64::from(first == 8))]);
            client
        });
        drop(clients);
        running.until(&[("outcore_waiting", 0), ("outcore_kv_waiting", 0), ("outcore_kv_active", 0)]);
        drop(held);
        check(7..1000, &answer(running.client_of(7..1000, "token-a")));
        running.end();
    });
}

#[test]
fn a_tenant_beyond_its_quota_is_told_when_to_come_back() {
    watched("a_tenant_beyond_its_quota_is_told_when_to_come_back", || {
        let running = Running::start();
        let row = running.server.table.rows(50..51).unwrap();
        let held = running.server.pool.runtime().pin(&row).write().wait().unwrap();
        let mut waiting = Vec::new();
        for (first, permits) in [(7, 0), (8, 1), (9, 2)] {
            waiting.push((first, running.client_of(first..1000, "token-a")));
            running.until(&[("outcore_kv_active", 63), ("outcore_kv_waiting", permits)]);
        }
        let refused = running.ask("/sum?rows=10..11", "token-a");
        assert!(refused.starts_with("HTTP/1.1 429 Too Many Requests\r\nRetry-After: "), "{refused}");
        let seconds = refused.lines().find_map(|line| line.strip_prefix("Retry-After: ")).unwrap();
        assert!(seconds.parse::<u64>().unwrap() > 0, "{refused}");
        assert!(
            refused.contains("2 requests of tenant 1 wait already") && refused.contains("try again later"),
            "{refused}"
        );
        // The other tenant's static share is there.
        check(200..300, &answer(running.client_of(200..300, "token-b")));
        drop(held);
        for (first, client) in waiting {
            check(first..1000, &answer(client));
        }
        running.end();
    });
}
