//! outcore in a server: `cargo run --release --example link_server 127.0.0.1:8080` says what to ask. Requests multiply
//! rows of a table larger than the budget. A row is a token: a tenant's request goes on from where an earlier one was.

use std::{error::Error, fmt::Display, io, ops::Range, pin::pin, sync::Arc, time::Duration};

use outcore::{Bytes, DType, ErrorKind, PageSize, Runtime, Tensor};
use outcore_kv::{ActiveOptions, KvLayout, KvPool, KvShape, KvStats, TenantId, TenantOptions, Token};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinSet, block_in_place, yield_now};

/// Bearer tokens, and whose they are. A real server keeps hashes of them.
const TENANTS: [(&str, TenantId); 2] = [("token-a", TenantId::new(1)), ("token-b", TenantId::new(2))];
pub(crate) const ROWS: u64 = 1024;
const KEYS: u32 = 256; // elements of a token's keys: here the sum up to it, again and again

pub(crate) struct Server {
    pub(crate) table: Tensor,
    pub(crate) pool: KvPool,
}

impl Server {
    pub(crate) fn open() -> outcore::Result<Self> {
        let page = PageSize::new(Bytes::kib(64))?;
        let runtime = Runtime::builder().page_size(page).device_budget(Bytes::mib(8)).open()?;
        let table = runtime.alloc(DType::U64, &[ROWS, 8192])?; // a row fills a page. Or a tensor of `open_model`
        for row in 0..ROWS {
            runtime.pin(&table.rows(row..row + 1)?).write().wait()?.view_mut::<u64>()?.fill(row);
        }
        let pool = KvPool::open(&runtime, KvLayout::new(KvShape::new(1, 1, KEYS, DType::U64)?, page)?, b"sums", 256)?;
        // Pages of the 128 in the budget: the table needs some too.
        pool.set_active(ActiveOptions::default().blocks_most(96));
        // Blocks that a tenant has whatever others have.
        let tenant = TenantOptions::default().active_reserved(16).waiting_most(2);
        TENANTS.iter().try_for_each(|(_, id)| pool.set_tenant(*id, tenant))?;
        Ok(Self { table, pool })
    }

    /// The sum of the products of the first of these rows with each of them. It can be dropped wherever it waits. While
    /// it waits for a permit or a scope it has nothing pinned, and while it waits for a block it has no scope.
    async fn sum(&self, tenant: TenantId, rows: Range<u64>) -> outcore::Result<String> {
        let tokens: Vec<Token> = rows.clone().map(|row| Token::new(row as u32)).collect();
        let permit = self.pool.admit(tenant, tokens.len() as u64)?.await?;
        let mut sequence = self.pool.begin(tenant, &tokens)?;
        sequence.activate(permit)?; // it goes back when the sequence is dropped
        let (known, mut sum) = (sequence.len(), 0);
        if known > 0 {
            let keys = (sequence.place(known - 1).1 * KEYS) as usize;
            sum = sequence.read(0, known - 1..known)?.pin().await?.view::<u64>(0)?[keys];
        }
        for (row, token) in rows.clone().zip(&tokens).skip(known as usize) {
            // Frames for both pins are set aside first: who has one pinned does not wait for others, but gets an error.
            let runtime = self.pool.runtime();
            let scope = runtime.scope().label("sum").reserve(Bytes::kib(2 * 64)).await?;
            let other = runtime.pin(&self.table.rows(row..row + 1)?).in_scope(&scope).await?;
            let first = runtime.pin(&self.table.rows(rows.start..rows.start + 1)?).in_scope(&scope).await?;
            sum += first.view::<u64>()?.iter().zip(other.view::<u64>()?).map(|(a, b)| a * b).sum::<u64>();
            drop((first, other, scope));
            let position = block_in_place(|| sequence.append(&[*token]))?; // may overwrite another tenant's bytes
            let keys = (sequence.place(position.start).1 * KEYS) as usize;
            sequence.write(0, position.clone())?.pin().await?.view_mut::<u64>(0)?[keys..keys + KEYS as usize].fill(sum);
            sequence.commit(position.end)?;
            yield_now().await; // to other requests, and to whoever sees that the client is gone
        }
        Ok(format!("{sum}\n{known} of {} rows were known\n", tokens.len()))
    }

    fn metrics(&self) -> String {
        let stats = self.pool.runtime().stats();
        let (uses, hits, waiting) = (stats.pager.uses, stats.pager.hits, stats.waiting);
        let [read, device, budget] = [stats.traffic.disk_read, stats.device.used, stats.device.budget].map(Bytes::get);
        let KvStats { used, active, waiting: permits, .. } = self.pool.stats();
        format!(
            "outcore_uses_total {uses}\noutcore_hits_total {hits}\noutcore_disk_read_bytes_total {read}\n\
             outcore_device_bytes {device}\noutcore_device_budget_bytes {budget}\noutcore_waiting {waiting}\n\
             outcore_kv_used {used}\noutcore_kv_active {active}\noutcore_kv_waiting {permits}\n"
        )
    }

    /// The text of an answer; or the status of a failure, which may have a header behind it, and why.
    async fn answer(&self, request: &str, token: &str) -> Result<String, (String, String)> {
        let failed = |status: &str, why: &dyn Display| (status.to_owned(), format!("{why}\n"));
        let target = request.strip_prefix("GET ").and_then(|rest| rest.split(' ').next()).unwrap_or_default();
        if target == "/metrics" {
            return Ok(self.metrics()); // counters: reading them waits for no request
        }
        let tenant = TENANTS.into_iter().find(|(known, _)| *known == token).map(|(_, tenant)| tenant);
        let tenant = tenant.ok_or_else(|| failed("401 Unauthorized\r\nWWW-Authenticate: Bearer", &"no such token"))?;
        let rows = target.strip_prefix("/sum?rows=").and_then(|rows| rows.split_once(".."));
        let rows = rows.and_then(|(start, end)| Some(start.parse().ok()?..end.parse().ok()?));
        let rows = rows.filter(|rows: &Range<u64>| !rows.is_empty() && rows.end <= ROWS);
        let rows = rows.ok_or_else(|| failed("404 Not Found", &"there are GET /metrics and GET /sum?rows=0..9"))?;
        let again = || self.pool.estimate(tenant, rows.end - rows.start).map_or(1, |wait| wait.as_secs() + 1);
        self.sum(tenant, rows.clone()).await.map_err(|error| match error.kind() {
            // Whatever may be asked for fits by itself: where that is too much, it is too much at a time.
            ErrorKind::BudgetTooSmall => failed(&format!("429 Too Many Requests\r\nRetry-After: {}", again()), &error),
            _ if error.is_transient() => failed("503 Service Unavailable", &error),
            _ => failed("500 Internal Server Error", &error),
        })
    }
}

/// Answers one request, of which it reads 8 KiB, within ten seconds.
async fn connection(server: Arc<Server>, mut stream: TcpStream) -> io::Result<()> {
    let (mut from, mut to) = stream.split();
    let mut lines = BufReader::new((&mut from).take(8 << 10)).lines();
    let read = async {
        let (request, mut token) = (lines.next_line().await?.unwrap_or_default(), String::new());
        while let Some(line) = lines.next_line().await?.filter(|line| !line.is_empty()) {
            let (name, value) = line.split_once(": Bearer ").unwrap_or_default();
            token = if name.eq_ignore_ascii_case("authorization") { value.to_owned() } else { token };
        }
        io::Result::Ok((request, token))
    };
    let (request, token) = tokio::time::timeout(Duration::from_secs(10), read).await??;
    let gone = async { while from.read(&mut [0; 512]).await.is_ok_and(|len| len > 0) {} };
    let answer = tokio::select! {
        answer = server.answer(&request, &token) => answer,
        () = gone => return Ok(()), // the answer is dropped: what it waits for, its pins, its permit, its blocks
    };
    let (status, text) = answer.map_or_else(|failure| failure, |text| ("200 OK".to_owned(), text));
    let head = format!("HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close");
    to.write_all(format!("{head}\r\nContent-Length: {}\r\n\r\n{text}", text.len()).as_bytes()).await
}

/// Serves until `end`. Requests that are under way then are dropped, as if their clients were gone.
pub(crate) async fn serve(server: Arc<Server>, listener: TcpListener, end: impl Future) {
    let (mut clients, mut end) = (JoinSet::new(), pin!(end));
    loop {
        tokio::select! {
            _ = &mut end => return clients.shutdown().await,
            Some(_) = clients.join_next() => {} // how its connection ended is each client's own business
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(clients.spawn(connection(server.clone(), stream))),
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await, // such as if too many are open
            },
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1); // without one, it ends at once
    let server = Arc::new(Server::open()?);
    let listener = TcpListener::bind(address.as_deref().unwrap_or("127.0.0.1:0")).await?;
    let at = listener.local_addr()?;
    println!("curl -i -H 'Authorization: Bearer token-a' 'http://{at}/sum?rows=1..100'; curl http://{at}/metrics");
    serve(server.clone(), listener, async { address.is_none() || tokio::signal::ctrl_c().await.is_ok() }).await;
    Ok(server.pool.runtime().clone().close()?)
}
