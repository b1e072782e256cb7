use outcore::{Bytes, DType, PolicyKind, Runtime};

fn main() -> outcore::Result<()> {
    let rt = Runtime::builder().device_budget(Bytes::mib(32)).policy(PolicyKind::Plan).open()?;
    let model = rt.open_model("model.gguf")?; // headers only; larger than 32 MiB is fine
    let w = model.tensor("blk.0.attn_q.weight")?;
    rt.plan(std::slice::from_ref(&w)); // the order of use, again and again: read ahead, and evicted by it
    let guard = rt.pin(&w).wait()?; // or `.await`; while the guard lives, the bytes stay
    println!("{} bytes at {:p}", guard.bytes().len(), guard.bytes().as_ptr());
    drop(guard);
    let t = rt.alloc(DType::F32, &[1 << 20])?; // read-write, zero-filled, paged to a scratch file
    rt.pin_mut(&t).wait()?.view_mut::<f32>()?.fill(1.0);
    rt.close()
}
