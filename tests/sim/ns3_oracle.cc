// Packets, by ns-3, as an independent judge of the flow-level network. Standard input, one item a line:
//     link A B BYTES_PER_SECOND    a duplex cable between two nodes, which are numbered from 0
//     flow A B BYTES               from host to host; all begin at time 0
// Standard output: a JSON array, per flow the second at which its last byte had arrived.
//
// DCTCP over cables of 1 us and ports that mark: of what ns-3 has it is nearest to the lossless, well-controlled transports
// of such fabrics; it has neither RoCE nor PFC. A lost packet costs a second (RFC 6298) and is not to be overlooked.
#include <algorithm>
#include <iomanip>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "ns3/applications-module.h"
#include "ns3/core-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"
#include "ns3/traffic-control-module.h"

using namespace ns3;

struct Link {
    uint32_t ends[2];
    double bytes_per_s;
};

struct Flow {
    uint32_t from, to;
    uint64_t left;
    double end_s;
};

static std::vector<Flow> flows;
static uint32_t running;

static void Received(uint32_t index, Ptr<const Packet> packet, const Address&) {
    Flow& flow = flows[index];
    flow.left -= packet->GetSize();
    if (flow.left > 0) return;
    flow.end_s = Simulator::Now().GetSeconds();
    if (--running == 0) Simulator::Stop();
}

static void Configure() {
    Config::SetDefault("ns3::TcpL4Protocol::SocketType", StringValue("ns3::TcpDctcp"));
    // With the headers of IP and TCP and a time stamp: 1500 bytes.
    Config::SetDefault("ns3::TcpSocket::SegmentSize", UintegerValue(1448));
    // Many flows over one port have windows of one packet, which the default would have wait 200 ms for its acknowledgement.
    Config::SetDefault("ns3::TcpSocket::DelAckTimeout", TimeValue(MicroSeconds(200)));
    // Every port marks from 65 packets on (Alizadeh et al., SIGCOMM 2010, section 3.4, for 10 Gb/s), by its queue's present length.
    Config::SetDefault("ns3::RedQueueDisc::UseEcn", BooleanValue(true));
    Config::SetDefault("ns3::RedQueueDisc::UseHardDrop", BooleanValue(false));
    Config::SetDefault("ns3::RedQueueDisc::MeanPktSize", UintegerValue(1500));
    Config::SetDefault("ns3::RedQueueDisc::MinTh", DoubleValue(65));
    Config::SetDefault("ns3::RedQueueDisc::MaxTh", DoubleValue(65));
    Config::SetDefault("ns3::RedQueueDisc::QW", DoubleValue(1));
    Config::SetDefault("ns3::RedQueueDisc::MaxSize", QueueSizeValue(QueueSize("1000p")));
    Config::SetDefault("ns3::DropTailQueue<Packet>::MaxSize", QueueSizeValue(QueueSize("1p")));
}

static std::map<uint32_t, Ipv4Address> Build(const NodeContainer& nodes, const std::vector<Link>& links) {
    InternetStackHelper().Install(nodes);
    std::map<uint32_t, Ipv4Address> address;
    Ipv4AddressHelper subnets("10.0.0.0", "255.255.255.252");
    TrafficControlHelper marking;
    marking.SetRootQueueDisc("ns3::RedQueueDisc");
    for (const Link& link : links) {
        PointToPointHelper cable;
        cable.SetDeviceAttribute("DataRate", DataRateValue(DataRate(uint64_t(link.bytes_per_s * 8))));
        cable.SetChannelAttribute("Delay", TimeValue(MicroSeconds(1)));
        NetDeviceContainer ports = cable.Install(nodes.Get(link.ends[0]), nodes.Get(link.ends[1]));
        marking.Install(ports);
        Ipv4InterfaceContainer given = subnets.Assign(ports);
        subnets.NewNetwork();
        for (uint32_t side : {0, 1}) address[link.ends[side]] = given.GetAddress(side);
    }
    Ipv4GlobalRoutingHelper::PopulateRoutingTables();
    return address;
}

static void Start(const NodeContainer& nodes, uint32_t index, Ipv4Address target) {
    const Flow& flow = flows[index];
    const uint16_t port = 10000 + index;
    PacketSinkHelper sink("ns3::TcpSocketFactory", InetSocketAddress(Ipv4Address::GetAny(), port));
    ApplicationContainer sinks = sink.Install(nodes.Get(flow.to));
    sinks.Get(0)->TraceConnectWithoutContext("Rx", MakeBoundCallback(&Received, index));
    BulkSendHelper source("ns3::TcpSocketFactory", InetSocketAddress(target, port));
    source.SetAttribute("MaxBytes", UintegerValue(flow.left));
    source.SetAttribute("SendSize", UintegerValue(8 * 1448));
    source.Install(nodes.Get(flow.from));
}

int main() {
    std::vector<Link> links;
    uint32_t last = 0;
    std::string kind;
    for (uint32_t a, b; std::cin >> kind >> a >> b;) {
        double amount;
        std::cin >> amount;
        if (kind == "link") links.push_back({{a, b}, amount});
        if (kind == "flow") flows.push_back({a, b, uint64_t(amount), -1});
        last = std::max({last, a, b});
    }
    Configure();
    NodeContainer nodes;
    nodes.Create(last + 1);
    std::map<uint32_t, Ipv4Address> address = Build(nodes, links);
    for (uint32_t i = 0; i < flows.size(); i++) Start(nodes, i, address[flows[i].to]);
    running = flows.size();
    Simulator::Stop(Seconds(60));
    Simulator::Run();
    if (running > 0) {
        std::cerr << running << " of " << flows.size() << " flows did not end within 60 simulated seconds" << std::endl;
        return 1;
    }
    std::cout << std::setprecision(9);
    for (const Flow& flow : flows) std::cout << (&flow == &flows[0] ? "[" : ", ") << flow.end_s;
    std::cout << "]" << std::endl;
}
