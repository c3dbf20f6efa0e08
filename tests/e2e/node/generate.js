// Streams one greedy answer with dynamically loaded contracts, and prints what came as one JSON object.
// usage: node generate.js PROTO_FOLDER ADDRESS PROMPT MAX_TOKENS
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [protos, address, prompt, maxTokens] = process.argv.slice(2);
const definition = loader.loadSync("crossdock/v1/inference.proto", {
  includeDirs: [protos],
  longs: String,
  enums: String,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).crossdock.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure());
const call = client.generateStream(
  { spec: { text: prompt, sampling: { temperature: 0, maxTokens: Number(maxTokens) }, stop: { ignoreEos: true } } },
  { deadline: Date.now() + 60000 },
);
const answer = { tokenIds: [], text: "", finish: null, usage: null };
call.on("data", (message) => {
  for (const delta of message.deltas ?? []) {
    answer.tokenIds.push(...(delta.tokenIds ?? []));
    answer.text += delta.text ?? "";
    answer.finish = delta.finish?.reason ?? answer.finish;
  }
  answer.usage = message.usage ?? answer.usage;
});
call.on("error", (error) => {
  console.error(`${error.code} ${error.details}`);
  process.exit(1);
});
call.on("end", () => {
  console.log(JSON.stringify(answer));
  client.close();
});
