// Unary gRPC load: raw messages, one thread that starts calls and waits on one completion queue.
//
// usage: grpcload HOST PORT METHOD CALLS CHANNELS WARM_S SECONDS MIN_ANSWERS LIMIT_S ANSWER_PREFIX REQUEST...
//
// A closed loop: each of CALLS begins with request i % num_requests, goes round all of them and asks again once it is
// answered. They share CHANNELS connections, as the calls of one client do. Answers count for SECONDS after WARM_S, and
// on until MIN_ANSWERS have come. A call that fails is not asked again, and its message goes to ANSWER_PREFIX.bad. At
// the end only requests that nobody has under way are sent once more, and all answers are awaited, so that the server
// is idle and its time can be divided by all answers. An answer to request k goes to ANSWER_PREFIX.k; figures go to
// stdout as one JSON object with the names that httpload gives them, statuses by gRPC's number.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr auto CONNECT_LIMIT = std::chrono::seconds(10);
constexpr auto POLL = std::chrono::milliseconds(20);

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

auto in_seconds(double seconds) {
    return std::chrono::system_clock::now() + std::chrono::microseconds(static_cast<long>(seconds * 1e6));
}

[[noreturn]] void die(const std::string &what) {
    fprintf(stderr, "%s\n", what.c_str());
    exit(2);
}

grpc::ByteBuffer read_file(const char *path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) die(path);
    grpc::Slice slice(std::string(std::istreambuf_iterator<char>(file), {}));
    return grpc::ByteBuffer(&slice, 1);
}

struct Call {
    grpc::GenericStub *stub;
    int request;
    double began;
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;
    grpc::ByteBuffer answer;
    grpc::Status status;
};

class Load {
  public:
    std::string method, answer_prefix;
    std::vector<grpc::ByteBuffer> requests;
    double count_from, count_to, give_up;
    size_t min_answers;

    void run(std::vector<Call> &calls) {
        is_last_sent.resize(requests.size());
        is_saved.resize(requests.size());
        for (Call &call : calls) start(call);
        double t;
        while (in_flight && (t = now()) < give_up) {
            if (!stopping && t >= count_to && (counted.size() >= min_answers || num_bad)) stop(calls, t);
            void *tag;
            bool is_ok;
            // The end of the timed part must be seen though nothing comes.
            if (queue.AsyncNext(&tag, &is_ok, std::chrono::system_clock::now() + POLL) != queue.GOT_EVENT) continue;
            Call &call = *static_cast<Call *>(tag);
            in_flight--;
            call.reader.reset();
            if (!count_answer(call)) continue;
            if (next_request(call)) start(call);
        }
        if (!stopping) stopped_at = now();
    }

    void report() {
        std::sort(counted.begin(), counted.end());
        double end = stopped_at < count_to ? stopped_at : std::max(last_counted, count_to), window = end - count_from;
        long all = 0;
        for (auto [code, count] : statuses) all += count;
        printf("{\"counted\":%zu,\"window_s\":%.4f,\"requests_per_s\":%.3f,", counted.size(), window,
               window > 0 ? counted.size() / window : 0);
        printf("\"p50_ms\":%.4f,\"p90_ms\":%.4f,\"p99_ms\":%.4f,\"max_ms\":%.4f,", quantile_ms(0.5), quantile_ms(0.9),
               quantile_ms(0.99), quantile_ms(1));
        printf("\"all\":%ld,\"bad\":%ld,\"connection_errors\":0,\"unfinished\":%d,\"statuses\":{", all, num_bad,
               in_flight);
        const char *separator = "";
        for (auto [code, count] : statuses) {
            printf("%s\"%d\":%ld", separator, code, count);
            separator = ",";
        }
        printf("}}\n");
    }

  private:
    grpc::CompletionQueue queue;
    int in_flight = 0;
    std::vector<double> counted;
    std::map<int, long> statuses;
    long num_bad = 0;
    double last_counted = 0, stopped_at = 0;
    bool stopping = false;
    // Last: what is sent while stopping, whose answer is kept.
    std::vector<bool> is_last_sent, is_saved;

    void start(Call &call) {
        call.context = std::make_unique<grpc::ClientContext>();
        call.context->set_deadline(in_seconds(give_up - now()));
        call.answer.Clear();
        call.began = now();
        call.reader = call.stub->PrepareUnaryCall(call.context.get(), method, requests[call.request], &queue);
        call.reader->StartCall();
        call.reader->Finish(&call.answer, &call.status, &call);
        in_flight++;
    }

    void stop(const std::vector<Call> &calls, double t) {
        stopping = true;
        stopped_at = t;
        for (const Call &call : calls)
            if (call.reader) is_last_sent[call.request] = true;
    }

    // False when the call failed.
    bool count_answer(const Call &call) {
        double t = now();
        statuses[call.status.error_code()]++;
        if (!call.status.ok()) {
            if (!num_bad++) std::ofstream(answer_prefix + ".bad") << call.status.error_message();
            return false;
        }
        if (t >= count_from && (t < count_to || counted.size() < min_answers)) {
            counted.push_back(t - call.began);
            last_counted = t;
        }
        // Writing takes time, so it waits for the end, where nothing is counted any more.
        if (stopping && !is_saved[call.request]) {
            is_saved[call.request] = true;
            save(call);
        }
        return true;
    }

    void save(const Call &call) const {
        std::vector<grpc::Slice> slices;
        call.answer.Dump(&slices);
        std::ofstream file(answer_prefix + "." + std::to_string(call.request), std::ios::binary);
        for (const grpc::Slice &slice : slices)
            file.write(reinterpret_cast<const char *>(slice.begin()), slice.size());
    }

    // Chooses what the call sends next; false when nothing is left.
    bool next_request(Call &call) {
        for (size_t i = 0; i < requests.size(); i++) {
            call.request = (call.request + 1) % requests.size();
            if (!stopping) return true;
            if (!is_last_sent[call.request]) {
                is_last_sent[call.request] = true;
                return true;
            }
        }
        return false;
    }

    double quantile_ms(double share) const {
        return counted.empty() ? -1 : counted[static_cast<size_t>((counted.size() - 1) * share)] * 1e3;
    }
};

std::unique_ptr<grpc::GenericStub> connect(const std::string &target) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    // Or all channels would share one connection.
    arguments.SetInt("grpc.use_local_subchannel_pool", 1);
    arguments.SetInt("grpc.enable_http_proxy", 0);
    auto channel = grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
    if (!channel->WaitForConnected(std::chrono::system_clock::now() + CONNECT_LIMIT)) die("no connection to " + target);
    return std::make_unique<grpc::GenericStub>(channel);
}

} // namespace

int main(int count, char **arguments) {
    if (count < 12)
        die("usage: grpcload HOST PORT METHOD CALLS CHANNELS WARM_S SECONDS MIN_ANSWERS LIMIT_S ANSWER_PREFIX "
            "REQUEST...");
    Load load;
    load.method = arguments[3];
    load.min_answers = atol(arguments[8]);
    load.answer_prefix = arguments[10];
    for (int i = 11; i < count; i++) load.requests.push_back(read_file(arguments[i]));
    std::vector<std::unique_ptr<grpc::GenericStub>> stubs;
    for (int i = 0; i < atoi(arguments[5]); i++) stubs.push_back(connect(arguments[1] + std::string(":") + arguments[2]));
    std::vector<Call> calls(atoi(arguments[4]));
    for (size_t i = 0; i < calls.size(); i++) {
        calls[i].stub = stubs[i % stubs.size()].get();
        calls[i].request = i % load.requests.size();
    }
    double began = now();
    load.count_from = began + atof(arguments[6]);
    load.count_to = load.count_from + atof(arguments[7]);
    load.give_up = began + atof(arguments[9]);
    load.run(calls);
    load.report();
    fflush(stdout);
    // Nobody waits for calls that are still under way, nor for gRPC's own threads.
    _Exit(0);
}
