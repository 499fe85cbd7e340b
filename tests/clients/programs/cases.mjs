// Cases of a client's program: each runs, and a line of JSON tells what came of it.
export const baseUrl = process.argv[2];
const found = [];

export function test(name, run) {
  found.push([name, run]);
}

export async function main() {
  const wanted = process.argv.slice(3);
  for (const [name, run] of found) {
    if (wanted.length && !wanted.includes(name)) continue;
    let error = "";
    try {
      await run();
    } catch (caught) {
      error = `${caught.stack ?? caught}\n${JSON.stringify(caught.cause ?? null)}`;
    }
    console.log(JSON.stringify({ case: name, error }));
  }
  process.exit(0);
}
