import org.apache.rocketmq.client.producer.DefaultMQProducer;

/** ProduceThroughFailover NAMESERVERS TOPIC THREADS: a SendLoop with settings that help in a failover. */
public final class ProduceThroughFailover {
    public static void main(String[] args) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("java-producer");
        producer.setNamesrvAddr(args[0]);
        producer.setPollNameServerInterval(1000);
        producer.setRetryTimesWhenSendFailed(5);
        producer.setRetryAnotherBrokerWhenNotStoreOK(true);
        producer.setSendMsgTimeout(5000);
        new SendLoop(args[1], 0).run(producer, Integer.parseInt(args[2]));
    }
}
