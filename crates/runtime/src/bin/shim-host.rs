//! Only the shim, for tests and manual use: `decapod-shim container <shim.json>`.

fn main() {
    if decapod_runtime::shim::is_shim_invocation() {
        decapod_runtime::shim::shim_main();
    }
    eprintln!("the runtime's tests start this program");
    std::process::exit(1);
}
