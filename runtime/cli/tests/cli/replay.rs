//! `outcore kv replay`: what is found is what can be counted by hand, with bytes and without.

use super::*;

/// Two conversations that begin with the same block, and one that only asks for it.
const REQUESTS: [(u64, u64, &str); 4] = [(1000, 40, "0,1"), (1024, 7, "0,2"), (1300, 40, "0,1,3"), (512, 0, "0")];
/// A small model: blocks of 16 tokens, in two groups of one page each.
const MODEL: [&str; 8] = ["--layers", "4", "--kv-heads", "2", "--head-dim", "64", "--page-size", "16KiB"];
/// By hand: whole blocks of 16 tokens without the last token of each prompt. The second request finds the 512 tokens of
/// block 0, the third one the 1000 of the first, and the fourth all but its last token.
const ASKED: u64 = 62 + 63 + 81 + 31;
const FOUND: u64 = 32 + 62 + 31;

fn line(time: usize, (input, output, ids): (u64, u64, &str)) -> String {
    format!(r#"{{"timestamp": {time}, "input_length": {input}, "output_length": {output}, "hash_ids": [{ids}]}}"#)
}

fn trace(dir: &Path, more: &[String]) -> String {
    let lines: Vec<String> = REQUESTS.into_iter().enumerate().map(|(time, request)| line(time, request)).collect();
    place(dir, "trace.jsonl", [&lines[..], more].concat().join("\n"))
}

fn arguments<'a>(trace: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["kv", "replay", trace][..], &MODEL, more].concat()
}

fn replayed(trace: &str, more: &[&str]) -> Value {
    json(&[&arguments(trace, more)[..], &["--json"]].concat())
}

/// Blocks found on the device, on the host, on disk and in the store.
fn by_tier(found: &Value) -> Vec<u64> {
    found["tiers"].as_array().unwrap().iter().map(|tier| tier["blocks"].as_u64().unwrap()).collect()
}

fn counts(found: &Value) -> [u64; 4] {
    ["requests", "blocks", "blocks_found", "blocks_computed"].map(|count| found[count].as_u64().unwrap())
}

#[test]
fn kv_replay_finds_what_can_be_counted_by_hand() {
    let dir = scratch();
    let trace = trace(dir.path(), &[]);
    let folder = dir.path().join("kv");
    let real = ["--real", string(&folder), "--pace"];
    let room = ["--device", "16MiB", "--host", "1MiB"];
    for way in [&[][..], &real] {
        let found = replayed(&trace, &[&room[..], way].concat());
        assert_eq!(counts(&found), [4, ASKED, FOUND, ASKED - FOUND], "{found}");
        assert_eq!((by_tier(&found), found["found_tokens"].as_u64()), (vec![FOUND, 0, 0, 0], Some(FOUND * 16)));
        assert_eq!((&found["too_large"], &found["block_tokens"]), (&0.into(), &16.into()));
        // The 62 blocks that were found once or more, of 32 KiB and a head each, and a manifest.
        let written = found["store_written_bytes"].as_u64().unwrap();
        assert_eq!(written / (36 << 10), 62, "{written}");
    }
    // What the first run has found is in the store for the next one.
    let again = replayed(&trace, &[&room[..], &real].concat());
    assert_eq!(by_tier(&again), [FOUND, 0, 0, 62], "{again}");
    assert_eq!(again["tiers"][3]["restored_bytes"], 62 * (32 << 10));
    assert_eq!(json(&["kv", "verify", string(&folder), "--json"])["damaged"], 0);
    // A folder of stores, as a server has one.
    let all = json(&["kv", "inspect", string(dir.path()), "--json"]);
    let stores = all["stores"].as_array().unwrap();
    assert_eq!((stores.len(), stores[0]["folder"].as_str()), (1, Some(string(&folder))));
    assert!(text(&["kv", "inspect", string(dir.path())]).contains(": 1, each of a model"));
    let broken = dir.path().join("broken");
    std::fs::create_dir(&broken).unwrap();
    std::fs::write(broken.join("1.kv"), b"nothing").unwrap();
    refused(&["kv", "verify", string(dir.path())], 1, &["1 of the stores", "beside 1", "broken"]);
    let limited = replayed(&trace, &[&room[..], &["--limit", "2", "--store", "0"]].concat());
    assert_eq!((counts(&limited)[..3].to_vec(), &limited["store_written_bytes"]), (vec![2, 62 + 63, 32], &0.into()));
    // The second blocks of the first and the third request are the same, those of the others are not.
    let apart = replayed(&trace, &[&room[..], &["--tenants", "100000"]].concat());
    assert_eq!(counts(&apart)[2], 62);

    let table = text(&arguments(&trace, &[&room[..], &["--prefill-rate", "500"]].concat()));
    for part in ["simulated", "h200", "none: computed", "52.7 %", "500 tokens/s", "TTFT saved", "nothing was read"] {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
    let table = text(&arguments(&trace, &[&room[..], &real].concat()));
    assert!(table.contains("as it was written") && table.contains("of rate"), "{table}");
}

/// In little memory, blocks are found in the tiers below; the pager that moves bytes and the one that does not agree on
/// how many are found.
#[test]
fn kv_replay_finds_blocks_in_all_tiers() {
    let dir = scratch();
    let more: Vec<String> = [(1500, 9, "0,1,4"), (1024, 9, "0,2"), (1030, 9, "0,2,5"), (1536, 3, "0,1,4")]
        .into_iter()
        .map(|request| line(9, request))
        .collect();
    let trace = trace(dir.path(), &more);
    let folder = dir.path().join("kv");
    let found_more = FOUND + 64 + 63 + 64 + 93;
    for park in [&[][..], &["--park"]] {
        let room = [&["--device", "2MiB", "--host", "1MiB", "--pool", "20MiB", "--save-every", "2"][..], park].concat();
        let simulated = replayed(&trace, &room);
        let real = replayed(&trace, &[&room[..], &["--real", string(&folder)]].concat());
        std::fs::remove_dir_all(&folder).unwrap();
        for found in [&simulated, &real] {
            assert_eq!(counts(found)[2], found_more, "{found}");
            let [device, host, disk, store] = by_tier(found)[..] else { panic!("{found}") };
            assert_eq!(device + host + disk, found_more);
            assert!(host > 0 && disk > 0 && store == 0, "{found}");
            assert!(found["evicted_pages"].as_u64().unwrap() > 0);
            assert!(found["scratch_written_bytes"].as_u64().unwrap() > 0);
        }
    }
    // A pool that holds one request: what was parked is in the store.
    let room = ["--device", "3MiB", "--host", "0", "--pool", "3200KiB", "--park"];
    for way in [&[][..], &["--real", string(&folder)]] {
        let found = replayed(&trace, &[&room[..], way].concat());
        assert_eq!((counts(&found)[2], by_tier(&found)[3] > 0), (found_more, true), "{found}");
        assert!(found["written_per_byte_read"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn kv_replay_counts_requests_that_are_too_large() {
    let dir = scratch();
    let trace = trace(dir.path(), &[line(5, (512, u64::MAX, "0")), line(6, (9, 0, "8"))]);
    for way in [&[][..], &["--real", string(&dir.path().join("kv"))]] {
        let found = replayed(&trace, &[&["--device", "16MiB", "--host", "0"][..], way].concat());
        assert_eq!((counts(&found), &found["too_large"]), ([6, ASKED, FOUND, ASKED - FOUND], &1.into()));
        let first = found["first_too_large"].as_str().unwrap();
        assert!(first.contains("line 5") && first.contains("the pool has") && first.contains("--pool"), "{first}");
        // The third request needs 84 pages at a time.
        let found = replayed(&trace, &[&["--device", "1200KiB", "--host", "16MiB"][..], way].concat());
        assert_eq!(found["too_large"], 2, "{found}");
        let first = found["first_too_large"].as_str().unwrap();
        assert!(first.contains("line 3") && first.contains("--device"), "{first}");
    }
}

#[test]
fn kv_replay_refuses_bad_input() {
    let dir = scratch();
    let whole = trace(dir.path(), &[]);
    let bad = |name: &str, text: &str, parts: &[&str]| {
        let path = place(dir.path(), name, text);
        refused(&arguments(&path, &[]), 1, &[&[name][..], parts].concat());
    };
    bad("empty.jsonl", "", &["no request", "at least one line"]);
    bad("text.jsonl", "hello\n", &["line 1", "hash_ids"]);
    bad("cut.jsonl", &line(0, REQUESTS[0])[..40], &["line 1", "EOF"]);
    bad("no.jsonl", r#"{"hash_ids": [1]}"#, &["line 1", "missing field `timestamp`"]);
    bad("few.jsonl", &line(0, (513, 1, "0")), &["line 1", "1 hash_ids", "takes 2 blocks of 512"]);
    bad("huge.jsonl", &line(0, (u64::MAX, 1, "0")), &["line 1", "36028797018963968 blocks"]);
    refused(&arguments(string(&dir.path().join("none")), &[]), 1, &["none", "check the path"]);
    refused(&arguments(string(dir.path()), &[]), 1, &[string(dir.path())]);
    let with = |more: &[&str], parts: &[&str]| refused(&arguments(&whole, more), 1, parts);
    with(&["--limit", "0"], &["no request", "--limit"]);
    with(&["--device", "8KiB"], &["--device 8.0 KiB", "16.0 KiB", "give more"]);
    with(&["--pool", "16KiB"], &["--pool 16.0 KiB", "32.0 KiB"]);
    with(&["--pool", "1EiB"], &["blocks", "8388608", "--pool"]);
    with(&["--store", "1MiB"], &["--store 1.0 MiB", "two files"]);
    with(&["--prefill-rate", "0"], &["--prefill-rate 0"]);
    with(&["--machine", "h2000"], &["h2000", "h200"]);
    refused(&arguments(&whole, &["--model", "llama-4000"]), 2, &["--model", "--layers"]);
    refused(&["kv", "replay", &whole, "--model", "llama-4000"], 1, &["llama-4000"]);
    refused(&["kv", "replay", &whole, "--pace"], 2, &["--real"]);
    refused(&["kv", "replay", &whole, "--tenants", "0"], 2, &["--tenants"]);
    refused(&["kv", "replay", &whole, "--layers", "0"], 1, &["0 layers"]);
    refused(&["kv", "replay"], 2, &["TRACE"]);

    let folder = dir.path().join("kv");
    let real = ["--real", string(&folder), "--device", "4MiB", "--host", "0"];
    replayed(&whole, &real);
    let other = [&["kv", "replay", &whole][..], &real, &["--layers", "8", "--page-size", "64KiB"]].concat();
    refused(&other, 1, &["kv", "of the model", "another folder"]);
    refused(&arguments(&whole, &["--real", &whole]), 1, &["trace.jsonl"]);
}
