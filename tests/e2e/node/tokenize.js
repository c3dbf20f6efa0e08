// Tokenizes a text so many times, one call after the other, and prints what came of each call as one JSON array.
// usage: node tokenize.js PROTO_FOLDER TARGET SERVICE_CONFIG CALLS
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [protos, target, config, calls] = process.argv.slice(2);
const definition = loader.loadSync("crossdock/v1/inference.proto", { includeDirs: [protos] });
const { InferenceService } = grpc.loadPackageDefinition(definition).crossdock.v1;
const client = new InferenceService(target, grpc.credentials.createInsecure(), { "grpc.service_config": config });
const tokenize = () =>
  new Promise((resolve) =>
    client.tokenize({ text: "x" }, { deadline: Date.now() + 30000 }, (error, answer) =>
      resolve(error ? { code: grpc.status[error.code] } : { code: "OK", tokenIds: answer.tokenIds }),
    ),
  );

(async () => {
  const came = [];
  while (came.length < Number(calls)) {
    came.push(await tokenize());
  }
  console.log(JSON.stringify(came));
  client.close();
})();
